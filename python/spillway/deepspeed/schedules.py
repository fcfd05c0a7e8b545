"""DeepSpeed's OneCycle and LRRangeTest, which move the rate, and OneCycle Adam's first beta, after each step.

    LRRangeTest  rate = min · (1 + step_rate · i / step_size), staircase: ⌊i / step_size⌋
    OneCycle     up from min to max in first_step_size steps, down in second_step_size, and then
                 min / (1 + decay_rate · i / decay_step_size); momentum runs the other way, from max to min and back

i counts the steps that were made, as `last_batch_iteration + 1` does there (deepspeed/runtime/lr_schedules.py, whose
order of operations this is). The first step has min, as the schedule sets it when it is made.
"""
import math

from ..library import Error


class _Schedule:
    def __init__(self, optimizer, last_batch_iteration):
        if last_batch_iteration != -1:
            raise Error("unsupported", f"last_batch_iteration: {last_batch_iteration} begins in mid-run; "
                                       "load_checkpoint() brings the schedule to where it was")
        self.optimizer, self.last_batch_iteration, self._last_lr = optimizer, -1, None

    def _each(self, value):
        """A value for each group."""
        groups = self.optimizer.param_groups
        values = list(value) if isinstance(value, (list, tuple)) else [value] * len(groups)
        if len(values) != len(groups):
            raise ValueError(f"expected {len(groups)} values, got {len(values)}")
        return values

    def _set(self, rates):
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        self._last_lr = list(rates)

    def step(self, batch_iteration=None):
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._set(self.get_lr())

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups] if self._last_lr is None else self._last_lr

    def state_dict(self):
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state):
        self.last_batch_iteration = state["last_batch_iteration"]


class LRRangeTest(_Schedule):
    def __init__(self, optimizer, lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000, lr_range_test_step_rate=1.0,
                 lr_range_test_staircase=False, last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size must be a positive integer, got {lr_range_test_step_size}")
        self._least, self._size = self._each(lr_range_test_min_lr), lr_range_test_step_size
        self._rate, self._stairs = lr_range_test_step_rate, lr_range_test_staircase
        self._set(self._least)

    def get_lr(self):
        interval = float(self.last_batch_iteration + 1) / self._size
        increase = 1 + self._rate * (math.floor(interval) if self._stairs else interval)
        return [least * increase for least in self._least]


class OneCycle(_Schedule):
    BETA2 = 0.99  # which DeepSpeed's sets beside the momentum that it moves

    def __init__(self, optimizer, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0, cycle_first_step_size=2000,
                 cycle_second_step_size=None, cycle_first_stair_count=0, cycle_second_stair_count=None,
                 decay_step_size=0, cycle_momentum=True, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.0,
                 last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration)
        self._first = float(cycle_first_step_size)
        self._second = self._first if cycle_second_step_size is None else float(cycle_second_step_size)
        if self._first <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, got {cycle_first_step_size}")
        if self._second < 0:
            raise ValueError(f"cycle_second_step_size must be non-negative, got {cycle_second_step_size}")
        self._stairs = (cycle_first_stair_count,
                        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count)
        self._rates = list(zip(self._each(cycle_min_lr), self._each(cycle_max_lr)))
        self._decays = decay_step_size, decay_lr_rate, decay_mom_rate
        self._momenta = None
        if cycle_momentum and moves_betas(optimizer):
            self._momenta = list(zip(self._each(cycle_min_mom), self._each(cycle_max_mom)))
            self._set_betas([least for least, _ in self._momenta])
        for group, (least, _) in zip(optimizer.param_groups, self._rates):
            group["lr"] = least

    def _set_betas(self, momenta):
        for group, momentum in zip(self.optimizer.param_groups, momenta):
            group["betas"] = (momentum, self.BETA2)

    def _scale(self):
        """How far up it is: 0 to 1."""
        made, total = self.last_batch_iteration + 1, self._first + self._second
        ratio = self._first / total
        at = 1.0 + made / total - math.floor(1 + made / total)
        up = at <= ratio
        stairs = self._stairs[0 if up else 1]
        if stairs <= 0:
            return at / ratio if up else (at - 1) / (ratio - 1)
        here = made % total  # of whole numbers, as a quotient may lie just below a stair
        position = here * stairs / self._first if here <= self._first else (total - here) * stairs / self._second
        return math.floor(position) / stairs

    def _after(self):
        """Steps after the cycle; None inside of it."""
        total = self._first + self._second
        return None if self.last_batch_iteration < total else self.last_batch_iteration - total + 1

    def get_lr(self):
        after, (size, rate, _) = self._after(), self._decays
        if after is None:
            scale = self._scale()
            return [least + (most - least) * scale for least, most in self._rates]
        decay = 1 if math.isclose(size, 0) or math.isclose(rate, 0) else 1 + rate * (after / size)
        return [least / decay for least, _ in self._rates]

    def get_mom(self):
        """(momentum, second beta) of each group; None where momentum does not move."""
        if self._momenta is None:
            return None
        after, (size, _, rate) = self._after(), self._decays
        if after is None:
            scale = self._scale()
            found = [most - (most - least) * scale for least, most in self._momenta]
        else:
            decay = 1 if math.isclose(size, 0) or math.isclose(rate, 0) else 1 + rate * (after / size)
            found = [most * decay for _, most in self._momenta]
        return [(momentum, self.BETA2) for momentum in found]

    def step(self, batch_iteration=None):
        super().step(batch_iteration)
        if self._momenta is not None:
            self._set_betas([momentum for momentum, _ in self.get_mom()])


def moves_betas(optimizer):
    """Adam and Lion have them."""
    engine = getattr(optimizer, "engine", None)
    return "betas" in (optimizer.defaults if engine is None else {name.rpartition(".")[2] for name in engine.settings})


KINDS = {"OneCycle": OneCycle, "LRRangeTest": LRRangeTest}


def made(section, optimizer):
    """Of the configuration's section scheduler."""
    params = section.get("params") or {}
    try:
        return KINDS[section["type"]](optimizer, **params)
    except TypeError as error:  # a key that it has not
        raise Error("invalid_argument", f"scheduler.params: {str(error).partition(') ')[2] or error}; see "
                                        f"deepspeed.runtime.lr_schedules.{section['type']}") from None
