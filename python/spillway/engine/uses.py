"""Which weights a step uses, as its forward passes and losses show: Uses, by which the engine is planned once more.

An engine is planned before anything has run: each block once, as the model lists them, unless an example says better.
What the plan must know is how often a parameter gets a gradient in a step, since the last one rounds the sum and lets
the update begin. A loss says so before its backward pass, by its graph: a block's visit is one node of it, which pushes
a gradient of each of the block's weights, and what is used outside of blocks ends in the parameter's own node, where
autograd adds it up to one gradient. If the loss asks for more than was planned, before the step has had gradients, the
plan is made once more, with the visits in the order in which forward made them: Engine.plan_again().
"""
import collections
import logging
import os
import tempfile
import weakref

import torch

from .. import log
from ..library import Error
from ..pieces import collected
from . import buffers
from .slices import NODES


class Uses:
    """Of the forward passes since the last backward()."""

    MOST = 100000  # of a loop that runs the model under autograd, and never backward

    def __init__(self):
        self.settled = False  # a backward pass has shown that the plan is right
        self.order = []       # indices of blocks, and ("lent", engine block)
        self.outside = set()  # (engine block, index), of the loss that is in backward, or was last
        self._loans = set()   # the same, of those that want a gradient
        self._graphs = []     # (index of block, weak reference to what its node has): whose graphs may be there

    def visited(self, index, mark):
        if len(self.order) < self.MOST:
            self.order.append(index)
            self._graphs.append((index, weakref.ref(mark)))

    def lent(self, owner, index, wants):
        if (not self.order or self.order[-1] != ("lent", owner)) and len(self.order) < self.MOST:
            self.order.append(("lent", owner))
        if wants:
            self._loans.add((owner, index))

    def forget(self):
        self.order.clear()
        self._graphs.clear()
        self._loans.clear()

    def take_loans(self):
        """Of a pass that is not looked through before it."""
        self.outside = set(self._loans)

    def asked(self, loss, lender):
        """Gradients that the loss's backward pass brings, by (engine block, index), and the marks of its visits.
        `lender`: of the engine, by which its parameters are known."""
        found, marks, self.outside = collections.Counter(), set(), set()
        for node in nodes_of(loss):
            if isinstance(node, NODES) and node.lender is lender:
                found.update((owner, index) for _, owner, index in node.block.trainable)
                marks.add(node.mark)
            place = _place(node, lender)
            if place is not None:
                found[place] += 1
                self.outside.add(place)
        return found, marks

    def others_wait(self, marks):
        """There is a graph of a block's that goes backward now, and another one of the same block that does not."""
        alive = [(index, mark()) for index, mark in self._graphs]
        mine = {index for index, mark in alive if mark in marks}
        return any(mark is not None and mark not in marks and index in mine for index, mark in alive)

    def order_of(self, planned):
        """The visits as forward made them, with those that were planned and did not come, a batch's unused experts say,
        after the one that they are planned after."""
        owners = {owner for owner, _ in self.outside}
        made = [use for use in self.order if not isinstance(use, tuple) or use[1] in owners]
        missing = [use for use in dict.fromkeys(planned) if use not in made and not isinstance(use, tuple)]
        for use in missing:
            before = planned[:planned.index(use)]
            at = max((i + 1 for i, other in enumerate(made) if other in before), default=0) if before else 0
            made.insert(at, use)
        return made


def nodes_of(loss):
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _lender(node):
    parameter = getattr(node, "variable", None)  # of a leaf of the graph
    known = getattr(parameter, "_spillway_lender", None) if isinstance(parameter, torch.nn.Parameter) else None
    return known and known()


def _place(node, lender):
    return node.variable._spillway_place if _lender(node) is lender else None


def engines_of(loss):
    """That it goes through."""
    found = {}
    for node in nodes_of(loss) if torch.is_tensor(loss) else ():
        lender = node.lender if isinstance(node, NODES) else _lender(node)
        engine = lender and lender.engine()
        if engine is not None:
            found[id(engine)] = engine
    return list(found.values())


def say_plan(engine):
    for line in engine.describe():
        log.say(logging.INFO, line)
    if (size := buffers.staying_bytes(engine.module)) >= 1 << 20:
        log.say(logging.INFO, f"buffers: {size >> 20} MiB stay on the device, in PyTorch's memory beside the budgets")
    if not engine._layout.pushes:
        return  # nothing is trained
    clipping = engine.settings["gradient_clipping"]
    log.say(logging.INFO, "gradient_clipping: " + (
        f"to a norm of {clipping:g}, in step() (1 where it is left out, as by DeepSpeed); 0 switches it off"
        if clipping else "is 0, so nothing is clipped; a loop's own clip_grad_norm_() is refused"))


def plan_for(engine, loss, more):
    """Before a backward pass: sees that its gradients are planned. `more`: others follow it."""
    layout, pushed = engine._layout, engine._pushed
    asked, marks = engine.uses.asked(loss, engine.lender)
    if layout.open:
        return
    if more or engine.uses.others_wait(marks):
        open_up(engine, "backward(retain_graph=True)" if more else "backward, beside other graphs of the same blocks")
        return
    begun = any(pushed.values())
    missing = [place for place, count in asked.items()
               if pushed[place] + count > (layout.pushes[place] if begun else layout.pushes_of_micro_batch(place))]
    if not missing:
        return
    name = layout.names[missing[0][0]][missing[0][1]]
    if begun:
        raise Error("invalid_argument", f"{name}: is used more often in a step than the plan's "
                                        f"{layout.pushes[missing[0]]} times, and the step has had gradients of it "
                                        "before; call discard_step(), and begin the step with a micro-batch that uses "
                                        "it, or with backward(loss, retain_graph=True), after which others may follow")
    layout.plan_again(engine.uses.order_of(layout.order), asked)
    open_again(engine)
    outside = [layout.names[owner][index] for owner, index in sorted(engine.uses.outside)]
    log.say(logging.INFO, f"{name}: gets {asked[missing[0]]} gradients of a micro-batch, more than was planned; the "
                          "plan was made once more, by what this first pass used" +
            (f", outside of blocks {', '.join(outside)}" if outside else ""))
    say_plan(engine)


def open_up(engine, why):
    """Takes any number of gradients in a step from here on, before it has had one."""
    layout = engine._layout
    if layout.open:
        return
    if any(engine._pushed.values()):
        raise Error("invalid_argument", f"{why}: more passes may follow it, but the step has earlier "
                                        "gradients, for which engine.backward(loss) ruled that "
                                        "out; call discard_step(), and begin "
                                        "the step with such a pass")
    layout.plan_again(engine.uses.order_of(layout.order), {}, any_number=True)
    open_again(engine)
    log.say(logging.INFO, f"{why}: more passes may follow it in a step, so gradients count as "
                          "complete only at step(); until then each has a sum in fp32, 4 bytes a "
                          "parameter, and the plan was "
                          "made once more")
    say_plan(engine)


def open_again(engine):
    """The engine as it is, by another plan. Its store keeps what it has, and what has none is carried over in memory:
    the weights, 4 bytes a parameter for as long as it takes, or where there are states a snapshot in a directory of its
    own. Of the graph that is to go backward nothing refers to the engine's memory. Where it cannot be made by that
    plan, which needs more memory than there is, say, it goes on by the one that it had, and the error is raised."""
    engine._refuse_held()
    engine.lender.refuse_held("backward")
    uncounted, step = engine.uncounted_steps, engine.current_step
    with tempfile.TemporaryDirectory(prefix="spillway-planned-again-") as folder, log.silent():
        weights, snapshot, ranks = None, None, engine.ranks
        if engine.settings.get("spillway.nvme_paths"):
            engine.flush()
        elif step == 0 and not engine._has_states:
            weights = collected(engine, None, bytes_too=True)
        else:
            made = os.path.join(ranks.same(folder) if ranks else folder, "snapshot")
            engine.save(made)
            snapshot = str(ranks.same_files(made, folder)) if ranks else made
        engine._handle = None
        engine._finalizer()
        existing, failure = "resume" if weights is None and snapshot is None else "refuse", None
        try:
            engine._create(existing, snapshot)
        except Error as error:
            failure = error
            engine._layout.go_back()
            engine._create(existing, snapshot)
        if weights is not None:
            engine._import(weights.pop)
        if ranks:
            ranks.same()  # no other one reads in the folder any more
    engine.uncounted_steps = uncounted
    engine.optimizer.tell()
    if failure is not None:
        raise failure
