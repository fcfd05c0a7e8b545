"""What initialize() itself does of a configuration's sections, where the library has no word for them: schedules that
move betas, csv_monitor, ignore_unused_parameters. The rest is the library's, and is read there as it stands.
"""
import csv
import json
import os

from ..library import Error, Named
from .schedules import KINDS


class Configured:
    """`config`: a path or a dict. What is taken out of it is in `schedule`, `monitor`, `all_used`."""

    def __init__(self, config):
        self.given, self.schedule, self.monitor, self.all_used = config, None, None, False
        self.values = self._read(config)
        self._changed = False
        if self.values is None:
            return
        scheduler = self.values.get("scheduler")
        if isinstance(scheduler, dict) and scheduler.get("type") in KINDS:
            self.schedule = self._take(self.values, "scheduler")
        monitor = self.values.get("csv_monitor")
        if isinstance(monitor, dict) and monitor.get("enabled") is True:
            self.monitor = self._take(self.values, "csv_monitor")
        zero = self.values.get("zero_optimization")
        if isinstance(zero, dict) and zero.get("ignore_unused_parameters") is False:
            self.all_used = not self._take(zero, "ignore_unused_parameters")

    @staticmethod
    def _read(config):
        """None: it is no plain JSON, and the library's to read or to refuse."""
        if isinstance(config, dict):
            return json.loads(json.dumps(config))
        try:
            with open(config, encoding="utf-8") as file:
                values = json.load(file)
            return values if isinstance(values, dict) else None
        except (OSError, ValueError, TypeError):
            return None

    def _take(self, section, name):
        self._changed = True
        return section.pop(name)

    def change(self):
        """The sections, to be changed."""
        if self.values is None:
            raise Error("unsupported", "initialize: an optimizer, or groups, are put into the configuration, which is "
                                       "to be plain JSON, or a dict, for it")
        self._changed = True
        return self.values

    @property
    def has_schedule(self):
        return self.values is not None and isinstance(self.values.get("scheduler"), dict)

    @property
    def one_rate(self):
        """Whether its scheduler gives all groups one rate, whatever theirs are, as DeepSpeed's does."""
        section = self.schedule or (self.values or {}).get("scheduler")
        if not isinstance(section, dict) or not isinstance(params := section.get("params") or {}, dict):
            return False
        if self.schedule is not None:
            return not any(isinstance(value, list) for value in params.values())
        kind = section.get("type")
        most = params.get("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else None)  # else each group's own
        return kind in ("WarmupLR", "WarmupDecayLR") and isinstance(most, (int, float))

    def for_engine(self):
        """As it was given, while nothing was taken out, so that messages name its lines."""
        if not self._changed:
            return self.given
        return Named(self.values, getattr(self.given, "name", None) or (
            "config" if isinstance(self.given, dict) else os.fspath(self.given)))


class CsvMonitor:
    """csv_monitor: a file a number, of lines of samples and values, as DeepSpeed's tools read them."""

    def __init__(self, section):
        self._folder = os.path.join(section.get("output_path") or "", section.get("job_name") or "DeepSpeedJobName")
        os.makedirs(self._folder, exist_ok=True)
        self._begun = set()

    def write(self, samples, **values):
        for name, value in values.items():
            path = os.path.join(self._folder, f"Train_Samples_{name}.csv")
            with open(path, "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if name not in self._begun:
                    self._begun.add(name)
                    writer.writerow(["step", name])
                writer.writerow([samples, value])
