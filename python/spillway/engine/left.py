"""What a block leaves beside its result: Left. A router's logits that a hook takes, a loss in an attribute.

In the first run these are tensors of a graph that ends with it. They become results of the block's visit, the objects
themselves: whoever has one has a tensor with the visit's node behind it. The second run finds their like again: what a
hook took by which of the inner modules' outputs it was, an attribute by its name.

Found is what leaves an inner module that has hooks or a forward of its own, as output or part of one, and what stands
in an attribute, or in a list, tuple or dict there. Anything else that is used in a loss is refused.
"""
import contextlib
import weakref

import torch

DEPTH, MOST = 3, 1000  # of lists, tuples and dicts in an attribute; their members
OWN = set(torch.nn.Module().__dict__)  # attributes that are PyTorch's


def _tensors(value, path=(), depth=DEPTH):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _tensors(each, (*path, place), depth - 1)
    elif depth and isinstance(value, dict):
        for place, each in value.items():
            yield from _tensors(each, (*path, place), depth - 1)


def _each(value, change, depth=DEPTH):
    """A copy, into which nothing is put that comes into the first one."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth and type(value) in (list, tuple):
        return type(value)(_each(each, change, depth - 1) for each in value)
    if depth and type(value) is dict:
        return {place: _each(each, change, depth - 1) for place, each in value.items()}
    return value


def _attributes(holder):
    return [(name, value) for name, value in holder.__dict__.items() if name not in OWN and
            (isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple, dict)) and len(value) <= MOST))]


class Attributes:
    """Around a run whose results alone count: what it leaves in attributes is `left`, by (number of holder, name, path)
    as of Left, and the attributes are what they were."""

    def __init__(self, block, others):
        self._holders, self.left = [*block.module.modules(), *others], {}

    def __enter__(self):
        self._before = [{name: (value, _each(value, lambda tensor: tensor)) for name, value in _attributes(holder)}
                        for holder in self._holders]
        return self

    def __exit__(self, *_):
        for number, (holder, before) in enumerate(zip(self._holders, self._before)):
            for name, value in _attributes(holder):
                was, copy = before.get(name, (None, None))
                known = {id(tensor) for _, tensor in _tensors(copy)}
                new = {(number, name, path): tensor for path, tensor in _tensors(value) if id(tensor) not in known}
                self.left.update(new)
                if not new:
                    continue
                if name not in before:
                    del holder.__dict__[name]
                    continue
                holder.__dict__[name] = was
                if value is was and type(was) is list:
                    was[:] = copy
                elif value is was and type(was) is dict:
                    was.clear()
                    was.update(copy)


class Left:
    """Of one visit."""

    def __init__(self, block, others):
        """`others`: modules outside of blocks, in whose attributes it may leave something."""
        self._holders = [*block.module.modules(), *others]
        self._hooked = [module for module in block.module.modules() if module is not block.module and
                        (module._forward_hooks or "forward" in module.__dict__)]
        self._before = [{name: _each(value, lambda tensor: tensor) for name, value in _attributes(holder)}
                        for holder in self._holders]
        self.outputs, self.attributes = [], []  # which: numbers of outputs; (number of holder, name, path)
        self._seen = []

    @contextlib.contextmanager
    def _outputs(self, keep):
        handles = []

        def took(_module, _arguments, output):
            self._seen += [keep(tensor) for _, tensor in _tensors(output)]

        self._seen = []
        try:
            for module in self._hooked:
                handles.append(module.register_forward_hook(took))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first(self):
        return self._outputs(weakref.ref) if self._hooked else contextlib.nullcontext()

    def find(self, known):
        """After the first run: the tensors that are still there, without their graph. `known`: arguments and
        results."""
        known, found = {id(tensor) for tensor in known}, []
        for number, reference in enumerate(self._seen):
            tensor = reference()
            if tensor is not None and self._is_new(tensor, known):
                self.outputs.append(number)
                found.append(tensor)
        self._seen = []
        here = [id(tensor) for each in self._before for value in each.values() for _, tensor in _tensors(value)]
        known.update(here)
        for number, holder in enumerate(self._holders):
            for name, value in _attributes(holder):
                for path, tensor in _tensors(value):
                    if self._is_new(tensor, known):
                        self.attributes.append((number, name, path))
                        found.append(tensor)
        for tensor in found:
            tensor.detach_()
        names = {(number, name) for number, name, _ in self.attributes}
        # Without what graphs of earlier runs hang on, or each would keep the one before.
        self._before = {(number, name): _each(self._before[number][name], torch.Tensor.detach)
                        if name in self._before[number] else self for number, name in names}
        return found

    @staticmethod
    def _is_new(tensor, known):
        if id(tensor) in known or tensor.grad_fn is None or hasattr(tensor.grad_fn, "mark") or tensor._is_view():
            return False  # another visit's; a view cannot become a result, and is refused where it is used
        known.add(id(tensor))
        return True

    def put(self, place, tensor):
        """In the place of what one slice of a batch has left there; False where it cannot be."""
        number, name, path = place
        if path:
            return False
        self._holders[number].__dict__[name] = tensor
        return True

    @contextlib.contextmanager
    def again(self):
        """Around the second run, after which `tensors` has what it left in the first's places."""
        here = {}
        for (number, name), value in self._before.items():
            attributes = self._holders[number].__dict__
            here[number, name] = attributes.get(name, self)
            if value is self:  # there was none
                attributes.pop(name, None)
            else:
                attributes[name] = _each(value, lambda tensor: tensor)
        self.tensors = []
        try:
            with self._outputs(lambda tensor: tensor) if self.outputs else contextlib.nullcontext():
                yield
            self.tensors = [self._seen[number] if number < len(self._seen) else None for number in self.outputs] + \
                [_at(self._holders[number].__dict__.get(name), path) for number, name, path in self.attributes]
        finally:
            self._seen = []
            for (number, name), value in here.items():
                if value is self:
                    self._holders[number].__dict__.pop(name, None)
                else:
                    self._holders[number].__dict__[name] = value


def _at(value, path):
    try:
        for place in path:
            value = value[place]
        return value
    except (TypeError, KeyError, IndexError):
        return None
