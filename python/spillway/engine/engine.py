"""Trains a torch.nn.Module whose weights, gradients and optimizer states do not fit: Engine."""
import collections
import contextlib
import ctypes
import logging
import os
import re
import weakref
from ctypes import byref, c_uint64, c_void_p

import torch

from .. import log
from ..library import (BACKWARD, DEVICES, FORWARD, ON_EXISTING, TIERS, Error, LedgerEntry, Line, Options, Report,
                       StepReport, destroy_engine, library, parse_config, settings_of)
from ..memory import address_of, tensor_at
from ..ranks import ranks_of, take_gpu
from . import module
from .away import send_away
from .blocks import Block, find_blocks, forward_order
from .contents import DTYPES, Contents, path_of
from .export import tell
from .gradients import Gradients
from .heads import Head, blocks_of, heads_of
from .layout import Layout
from .leases import Leases
from .lent import Lender
from .optimizer import EngineOptimizer
from .passes import Passes
from .seeds import Seeds
from .together import TrainsBatches
from .uses import Uses, say_plan
from .visits import run_in_visits

UNCOUNTED = re.compile(rb"spillway\.uncounted (-?\d+)\n")  # before the caller's blob in commits and snapshots


class Engine(TrainsBatches, Contents):
    """Gives a model's parameters to Spillway and runs the model block by block.

    `model`: any torch.nn.Module. Its parameters are taken out of it, and reading one outside of its
      block is an error.
    `config`: path or dict, a DeepSpeed-style ds_config.json.
    `blocks`: modules, or names of modules, that are gathered and released as a whole; the default are the members of
      every ModuleList and Sequential. What is left over becomes blocks by itself. A block is run once more in backward.
    `example`: arguments of a forward pass, a tuple or a dict; it is run once, to see in which order blocks run and how
      often. Without it: each once, in the order in which the model lists them.
    `weights`: a directory or file of safetensors, or a function from a parameter's name to its values, for models on
      PyTorch's device "meta"; the default are the model's own.
    `on_existing`: what to do with a store that is there: "refuse", "resume" or "replace".
    `snapshot`: one that save() made, to begin with.
    `aio`: path or dict, what `spillway sweep --json` wrote; it is put over the configuration.
    `ranks`: the processes that train the model together, each with rows of its own: a process group of
      torch.distributed, or a spillway.ranks.Ranks; "auto": all processes, where the script has initialized a group;
      None: this process alone. All of them make the same calls, in the same order: docs/ranks_pytorch.md.
    `seed`: with spillway.sum_groups, of the random numbers that a micro-batch's forward draws from torch's generators;
      the default is torch.initial_seed(), what torch.manual_seed() has set.
    `optimizer`: its rate is what PyTorch's schedulers set. What an engine does not have itself, train() say, is the
      module's. Threads: any, one at a time. Errors: spillway.Error.
    """

    def __init__(self, model, config, *, blocks=None, example=None, weights=None, on_existing="refuse", snapshot=None,
                 trace=None, aio=None, ranks="auto", seed=None):
        self._library = library()
        self._handle = None
        self._held = weakref.WeakSet()  # Leases
        self._unfinished = False        # there are gradients of a step that must be discarded
        self.module = model
        self.lender, self.uses = Lender(self), Uses()  # of weights outside of their blocks
        self.passes = Passes(self)
        self.ranks, self._own_ranks = ranks_of(ranks)
        try:  # a Ranks of its own is closed, too
            self._read_config(config, aio)
            if on_existing not in ON_EXISTING:
                raise Error("invalid_argument", f"on_existing: '{on_existing}' is none of {', '.join(ON_EXISTING)}")
            weights = module.checked(model, weights, on_existing != "resume" and snapshot is None)
            slices = self.settings.get("spillway.logit_slices", 1)
            heads = heads_of(model) if slices > 1 else []
            self._blocks = find_blocks(model, blocks, heads)
            together = self.settings.get("spillway.micro_batches_together", False)
            self._layout = Layout(model, self._blocks, forward_order(model, self._blocks, example),
                                  1 if together else self._accumulation)
            cut = blocks_of(heads, self._blocks, self._layout) if slices > 1 else []
            self._trace = trace
            self.steps_begun = 0
            self._create(on_existing, snapshot)
            begins = self.current_step == 0 and snapshot is None and on_existing != "resume"
            self.seeds = Seeds(self, seed)
            if self.ranks is not None:
                self._as_on_first(begins, weights)
            if begins:
                self._import(weights)
        except BaseException:
            self._end()
            raise
        self._take_over()
        for index, vocabulary in cut:
            Head(weakref.proxy(self), self._blocks[index], index, vocabulary, slices)
        EngineOptimizer(model).attach(self)
        say_plan(self)
        tell(model)

    __reduce_ex__ = module.refuse_to_pickle

    def __getattr__(self, name):  # of what is the module's: train(), eval(), generate(), config
        if name.startswith("_") or "module" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        if not hasattr(self.module, name):
            raise AttributeError(f"neither {type(self).__name__} nor {type(self.module).__name__} has '{name}'")
        return getattr(self.module, name)

    # -- the description ------------------------------------------------------------------------------------------

    def _read_config(self, config, aio):
        self._processes = 1 if self.ranks is None else self.ranks.count
        self._config = parse_config(config, aio, self._processes)
        weakref.finalize(self, self._library.config_destroy, self._config)
        self.settings = settings_of(self._config)
        self._type = self._library.config_weights(self._config)
        self.dtype = DTYPES[self._type]
        self._element_bytes = torch.empty(0, dtype=self.dtype).element_size()
        self._accumulation = self._library.config_gradient_accumulation(self._config)
        self._micro_batches = 0
        self._pushed, self._ended = collections.Counter(), set()  # (engine block, index); told that no more come

    def _create(self, on_existing, snapshot):
        options = Options(ON_EXISTING.index(on_existing), 0, path_of(snapshot), path_of(self._trace))
        model = self._layout.describe(self._library, self._element_bytes)
        try:
            handle = c_void_p()
            ranks = None if self.ranks is None else self.ranks.handle
            if self.settings.get("spillway.device") != "host":
                take_gpu(ranks is not None)
            self._library.engine_create_on(ranks, self._config, model, byref(options), byref(handle))
        finally:
            self._library.model_destroy(model)
        self._handle, self._streams, self._process = handle, {}, os.getpid()  # a fork has none of its threads
        # Also when the engine is forgotten, and when the interpreter ends.
        self._finalizer = weakref.finalize(self, destroy_engine, self._library, handle, self._streams, self._process)
        self.on_cuda = list(DEVICES)[self._library.engine_device(handle)] == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else torch.device("cpu")
        size = c_uint64()
        self._workspace = tensor_at(self.device, self._library.engine_workspace(handle, byref(size)), size.value)
        self.uncounted_steps, _ = self._record()  # that DeepSpeed counted and Adam did not: of fp16, skipped
        self._views, self._addresses = {}, set()
        self._layout.forget_packed()
        self._layout.keep()
        self._has_states = self._has_states or snapshot is not None

    def _take_over(self):
        """Empties the parameters and puts visits in the place of forwards."""
        module.empty(self.module, self._layout, self.dtype, self.device)
        for block in self._blocks:
            for entries in (block.parameters, block.trainable):
                entries[:] = [(self._layout.members[owner][index], owner, index) for _, owner, index in entries]
        self._gradients = Gradients(self._layout.members, self._layout.names)
        self._versions = {id(p): p._version for members in self._layout.members for p in members}
        self.anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.anchor_node = self.anchor.view_as(self.anchor).grad_fn.next_functions[0][0]
        inside = {id(each) for block in self._blocks for each in block.module.modules()}
        self.others = [each for each in self.module.modules() if id(each) not in inside]
        for owner, index in self._layout.pushes:
            self.lender.watch(self._layout.members[owner][index], owner, index)
        lender, engine = weakref.ref(self.lender), weakref.proxy(self)
        for block in reversed(self._blocks):  # of those that have it, the first one gives a parameter its name
            block.own = [entry for entry in block.parameters if isinstance(entry[0], torch.nn.Parameter)]
            for parameter, *place in block.parameters:
                send_away(parameter, self._layout.names[place[0]][place[1]], block.name, tuple(place), lender,
                          self._layout.packed.get(tuple(place)))
        for number, block in enumerate(self._blocks):
            run_in_visits(engine, block, number)
        module.bind(engine, self.module, self._blocks)
        module.leave_checkpointing_to_blocks(self.module)
        module.train_without_caches(self.module, self._blocks)
        if self.ranks is not None and self.ranks.all:
            module.generate_together(self.module)

    def _stream(self):
        """The engine's name for the stream that PyTorch works on; None: the engine's own, on a CPU."""
        if not self.on_cuda:
            return None
        native = torch.cuda.current_stream(self.device).cuda_stream
        if native not in self._streams:
            stream = c_void_p()
            self._library.engine_adopt_stream(self._handle, native, byref(stream))
            self._streams[native] = stream
        return self._streams[native]

    def weights_of(self, block, direction=FORWARD):
        """A context manager: a block's weights (of a module, or its name) are in its parameters, to be read."""
        return Leases(self, block, direction)

    def without_weights(self, leaves):
        """A block's results, with copies of those that are weights: their memory is given to the next block."""
        return [leaf.clone() if torch.is_tensor(leaf) and leaf.layout == torch.strided and address_of(leaf) in
                self._addresses else leaf for leaf in leaves]

    def _block(self, module):
        if isinstance(module, Block):
            return module
        module = self.module.get_submodule(module) if isinstance(module, str) else module
        for block in self._blocks:
            if module in (block.module, *getattr(block.module, "owner", ())):
                return block
        raise Error("invalid_argument", f"{type(module).__name__}: is no block; blocks are "
                    f"{', '.join(block.name for block in self._blocks[:8])} …")

    # -- a step ---------------------------------------------------------------------------------------------------

    def __call__(self, *arguments, **keywords):
        return self.module(*arguments, **keywords)

    def push(self, entries, gradients, ends=False):
        """Gradients of (parameter, engine block, index) to the engine, by way of the workspace. None stays none: a
        parameter that gets no other in a step is left out of its update, as PyTorch's optimizers leave it out. Where
        any number may come, it says that no more do, if it `ends` them."""
        stream, used, any_number, factor = self._stream(), 0, self._layout.open, self.passes.factor
        micro_batch = self._first_micro_batch + self.passes.micro_batch
        self.passes.brought()
        for (parameter, owner, index), gradient in zip(entries, gradients):
            planned = self._layout.pushes[owner, index]
            if self._pushed[owner, index] == planned and not any_number:
                raise Error("invalid_argument", f"{self._layout.names[owner][index]}: is used more often in a step "
                            f"than the plan's {planned} times; give the engine an example= of a forward pass")
            if gradient is None:
                if ends or not any_number:
                    self._library.engine_push_gradient_of(self._open(), micro_batch, owner, index, None, 0, self._type,
                                                          stream)
                self._pushed[owner, index] += 1
                if ends:
                    self._ended.add((owner, index))
                continue
            size = parameter.numel() * self._element_bytes
            if used + size > self._workspace.numel():
                if not self.on_cuda:  # where all of this is in order with the stream by itself
                    self._library.stream_synchronize(self._open(), stream)
                used = 0
            place = self._workspace[used:used + size].view(self.dtype)
            place.copy_(gradient.reshape(-1) if factor == 1 else gradient.reshape(-1) * factor)
            self._library.engine_push_gradient_of(self._open(), micro_batch, owner, index, place.data_ptr(),
                                                  parameter.numel(), self._type, stream)
            self._pushed[owner, index] += 1
            self._gradients.bring(owner, index)
            used += -(-size // 2048) * 2048  # where the next one is aligned as weights are
        if not self.on_cuda:
            self._library.stream_synchronize(self._open(), stream)

    def set_learning_rate(self, rate):
        """Of the steps that come; before a step's first backward(). Neither store nor snapshot keep it."""
        self._library.engine_set_learning_rate(self._open(), rate)
        self.optimizer.given(rate)

    def next_learning_rate(self):
        """Of the step that comes."""
        return self._library.engine_next_learning_rate(self._open())

    _has_states = False  # before the first step: some were written, or loaded
    plain_factor, plain_decides = 1, True  # loss.backward(): times its gradients; step() after it makes a step

    def backward(self, loss, scale_wrt_gas=True, retain_graph=False):
        """Of one micro-batch: the loss is divided by the configuration's gradient_accumulation_steps, unless the caller
        has weighted the step's losses, and says scale_wrt_gas=False. What goes backward without a forward pass before
        it belongs to the same micro-batch; `retain_graph` says that it will. Of other engines that the loss goes
        through it is a micro-batch, too.

        An exception out of it discards the step, and so what backward() did for its earlier micro-batches.
        """
        self.passes.backward(loss, scale_wrt_gas, retain_graph)

    def scale(self, loss):
        """The loss times the loss scale, for loss.backward() in fp16; else the loss."""
        return self.passes.scale(loss)

    def _give_up(self, held):
        """Discards the step, after an exception in it. `held`: the leases from before."""
        self._unfinished = True
        for leases in set(self._held) - held:
            leases.end()
        self.lender.end_all()
        try:
            self.discard_step()
        except Error as error:
            self._unfinished = error.code == "invalid_argument"  # else it has ended, and every further call says so

    def step(self, blob=b"", early=False):
        """Once all micro-batches have been through backward(), or after a plain loss.backward(): clips, updates and
        commits, and returns a StepReport; before that None. `early`: the step ends with the micro-batches that there
        are, such as an epoch's last ones. `blob`, at most 16,000 bytes, is kept by the commit: where the data stands,
        random state. After Ctrl-C in it the step is either made, which current_step says, or discarded."""
        handle = self._open()
        if not isinstance(blob, bytes):
            raise Error("invalid_argument", f"blob: is a {type(blob).__name__}, not bytes; json.dumps(…).encode() "
                                            "makes some, and engine.blob has them after a resume")
        self.passes.refresh()
        if self._micro_batches < (1 if early else self._accumulation) and not self.passes.decides:
            return None
        if self.uncounted_steps:
            blob = b"spillway.uncounted %d\n" % self.uncounted_steps + blob
        self.optimizer.before_step()
        self.lender.refuse_held("step")
        report, held, before = Report(), set(self._held), self.current_step
        try:
            self._push_what_is_missing()
            self._library.engine_step(handle, blob, len(blob), byref(report))
            return self._end_step(report)
        except Error as error:
            if error.code == "non_finite":  # the engine has forgotten the step
                self._begin_step()
                raise Error(error.code, f"{error}; native code that reads a weight outside of its "
                                        "block also gets NaN: name in blocks= a module that has "
                                        "both") from None
            raise
        except BaseException:  # Ctrl-C, before the step was made or after it
            if self.current_step > before:
                self._end_step(report)
            else:
                self._give_up(held)
            raise

    def _end_step(self, report):
        self._begin_step()
        report = StepReport(**report.values())
        self.optimizer.after_step(report)
        return report

    @property
    def _first_micro_batch(self):
        """Of this rank: how many a step has on ranks before it."""
        return self.ranks.rank * self._accumulation if self.ranks else 0

    @property
    def step_is_due(self):
        """All micro-batches of the step have been through backward()."""
        return self._micro_batches >= self._accumulation

    def discard_step(self):
        """Forgets what backward() did since step(): the next micro-batch is the first of the step."""
        unfinished, self._unfinished = self._unfinished, False
        try:
            self.lender.refuse_held("discard_step")
            self.uses.forget()
            self._library.engine_discard_step(self._open())
            self._begin_step()
            self._gradients.hide()
        except BaseException as error:  # with Ctrl-C, half of it may be done
            self._unfinished = unfinished or not isinstance(error, Error)
            raise

    def zero_grad(self, *_, **__):
        """Also of the optimizer and of the model: as with PyTorch's, what backward() did since step() is discarded."""
        self.passes.refresh()
        if self._micro_batches > 0:
            log.say(logging.WARNING, f"zero_grad: the {self._micro_batches} of {self._accumulation} micro-batches that "
                                     "the step has had are discarded")
            self.discard_step()
        self._gradients.hide()

    def _begin_step(self):
        self._micro_batches = 0
        self.passes.begin_step()
        self.seeds.forget()
        self._pushed.clear()
        self._ended.clear()
        self._gradients.begin_step()
        self.steps_begun += 1

    def _push_what_is_missing(self):
        """That the step brings no gradient of what it did not use, an expert that got no token, say; and no more of
        what it did, where any number might have come."""
        for owner in reversed(range(len(self._layout.members))):
            here = [i for i in range(len(self._layout.members[owner])) if (owner, i) in self._layout.pushes]
            missing = [(i, (owner, i) not in self._ended if self._layout.open else
                        self._layout.pushes[owner, i] - self._pushed[owner, i]) for i in here]
            if not any(count > 0 for _, count in missing):
                continue
            visited = Block(None, None)
            visited.engine_blocks = [owner]
            used = self._layout.open and any(self._pushed[owner, i] for i in here)
            with contextlib.nullcontext() if used else self.weights_of(visited, BACKWARD):
                entries = [(self._layout.members[owner][i], owner, i) for i, count in missing for _ in range(count)]
                self.push(entries, [None] * len(entries), ends=True)

    # -- the rest -------------------------------------------------------------------------------------------------

    @property
    def current_loss_scale(self):
        """In fp16 what backward() multiplies the loss with; else 1."""
        return self._library.engine_loss_scale(self._open())

    @property
    def current_step(self):
        """The last step that was made, 0 before the first."""
        return self._library.engine_current_step(self._open())

    @property
    def blob(self):
        """What step() was given in the current step, also of a run that was resumed."""
        return self._record()[1]

    def _record(self):
        """(uncounted_steps, the caller's blob) of the current step."""
        size = self._library.engine_blob(self._open(), None, 0)
        out = ctypes.create_string_buffer(size)
        self._library.engine_blob(self._open(), out, size)
        mark = UNCOUNTED.match(out.raw)
        return (int(mark[1]), out.raw[mark.end():]) if mark else (0, out.raw)

    @property
    def predicted_step_seconds(self):
        """Of the plan, by the links as measured and the computing so far; None before the first step."""
        return self._library.engine_predicted_step_seconds(self._open()) or None

    def describe(self):
        """The facts of the plan, a line each."""
        lines = []
        self._library.engine_describe(self._open(), Line(lambda _, text: lines.append(text.decode())), None)
        return lines

    def ledger(self):
        """(tier, purpose, bytes) of every reservation."""
        found = []
        self._library.engine_ledger(self._open(), LedgerEntry(
            lambda _, tier, purpose, size: found.append((TIERS[tier], purpose.decode(), size))), None)
        return found

    def flush(self):
        """Makes the current step durable."""
        self._library.engine_flush(self._open())

    def close(self):
        """Makes the last finished step durable and gives everything back, also when it raises what went wrong with
        that. The model keeps no weights."""
        if self._handle is None:
            return
        self._refuse_held()
        try:
            if os.getpid() == self._process:
                with contextlib.nullcontext() if self.ranks is None else self.ranks.ending():
                    self._library.engine_flush(self._handle)
        except Error as error:
            if error.code != "busy":  # with another thread inside of a call nothing was done
                self._end()
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self):
        """The same without an exception: what goes wrong is a message of the library's."""
        if self._handle is not None:
            self.lender.end_all()
            self._handle = None
            self._finalizer()
        if self._own_ranks:
            self.ranks.close()

    def _refuse_held(self):
        self.lender.return_all()
        if self._held:
            raise Error("invalid_argument", "engine: a block's weights are in use; close the engine after weights_of()")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            return self.close()
        for leases in list(self._held):  # the exception counts, and may be what keeps them
            leases.end()
        self._end()

    def _open(self):
        """The handle of an engine that can be asked for things."""
        if self._handle is None:
            raise Error("invalid_argument", "engine: it is closed")
        if self._unfinished:
            raise Error("invalid_argument", "engine: a step was left unfinished in backward, while a block's weights "
                                            "were in use; call discard_step()")
        return self._handle
