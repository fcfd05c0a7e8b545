"""What comes along from DeepSpeed beside weights and states: the schedule; and settings that differ, which are said."""
import logging
import tempfile

from case import main
from deepspeed_import_test import Case, deepspeeds, halving

import torch

from toy_model import config, model, train


class LoadCheckpoint(Case):
    def test_SchedulesAreSaidWhereTheyDiffer(self):
        engine, snapshot = self.trained(2)
        engine.close()
        made = deepspeeds(snapshot, model(), 2)
        warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_type": "linear"}}

        def asking(optimizer):
            class Asking(torch.optim.lr_scheduler.LambdaLR):
                def step(self, epoch=None, *, metric=None):
                    if self.last_epoch >= 0 and metric is None:
                        raise TypeError("no metric")
                    super().step()
            return Asking(optimizer, lambda step: 0.5)

        def line(saved, scheduler, rate, configured=None, **options):
            made.scheduler, made.settings[0]["lr"] = saved, rate
            folder = made.write(tempfile.mkdtemp(dir=self.folder) + "/saved")
            loading = self.initialize(configuration=config(self.folder, **(configured or {})), lr_scheduler=scheduler)
            with self.assertLogs("spillway", logging.INFO) as logged:
                loading.load_checkpoint(folder, **options)
            if scheduler is plateau:
                loading.lr_scheduler = None  # it asks for metrics
            report = train(loading, 1, first=2)[1][0]
            loading.close()
            return logged.records[-1].getMessage().partition("; ")[2].partition("; ")[2], report.learning_rate

        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        theirs = "its learning rate 0.00025 counts, not the configuration's 0.001; optimizer.param_groups[0]['lr'] " \
            "sets another"
        self.assertEqual(("", 1e-3 / 8), line({"last_batch_iteration": 2}, halving, 1e-3 / 8))
        self.assertEqual(("trained otherwise from here: lr 0.000125, not 0.00025", 1e-3 / 8),
                         line({"last_batch_iteration": 2}, halving, 2.5e-4))
        self.assertEqual(("lr_scheduler begins anew", 1e-3), line(None, halving, 1e-3))
        # As with DeepSpeed the checkpoint's rate counts where no schedule computes another.
        self.assertEqual((f"lr_scheduler begins anew; {theirs}", 2.5e-4), line({"last_epoch": 9}, plateau, 2.5e-4))
        self.assertEqual((f"a schedule that had made 9 steps ends here: no lr_scheduler was given; {theirs}", 2.5e-4),
                         line({"last_epoch": 9}, None, 2.5e-4))
        self.assertEqual((theirs, 2.5e-4), line({"last_epoch": 9}, halving, 2.5e-4, load_lr_scheduler_states=False))
        self.assertEqual(("", 2.5e-4), line({"last_batch_iteration": 1}, None, 2.5e-4, {"scheduler": warmup}))
        self.assertEqual(("the schedule had made 9 steps, and goes on from 2", 2.5e-4),
                         line({"last_batch_iteration": 8}, None, 2.5e-4, {"scheduler": warmup}))
        self.assert_error(r"Asking cannot be stepped 3 times, as often as DeepSpeed's was \(no metric\); give one",
                          line, {"last_epoch": 3}, asking, 1e-3)

    def test_AScheduleMayBeAProgramsOwn(self):
        engine, snapshot = self.trained(2)
        engine.close()
        saved = deepspeeds(snapshot, model(), 2)
        saved.scheduler = {"last_epoch": 2}
        saved = saved.write(self.folder / "saved")

        class Own:
            """No more than is asked of one."""
            def __init__(self, optimizer):
                self.steps, self._group = 0, optimizer.param_groups[0]

            def step(self):
                self.steps, self._group["lr"] = self.steps + 1, self._group["lr"] / 2

            def get_last_lr(self):
                return [self._group["lr"]]

        class WithState(Own):
            def state_dict(self):
                return {"steps": self.steps}

            def load_state_dict(self, state):
                self.steps = state["steps"]

        engine = self.initialize(lr_scheduler=WithState)
        engine.load_checkpoint(saved)
        self.assertEqual((2, [2.5e-4]), (engine.lr_scheduler.steps, engine.get_lr()))
        engine.close()
        engine = self.initialize(lr_scheduler=Own)
        self.assert_error("^lr_scheduler: Own cannot be stepped 2 times, .*state_dict", engine.load_checkpoint, saved)
        self.assertEqual((0, [1e-3]), (engine.lr_scheduler.steps, engine.get_lr()))

    def test_AScheduleThatIsTooShortLeavesEverythingAsItIs(self):
        engine, snapshot = self.trained(2)
        engine.close()
        made = deepspeeds(snapshot, model(), 2)
        made.scheduler, made.settings[0]["lr"] = {"last_epoch": 50}, 3e-4
        saved = made.write(self.folder / "saved")
        engine = self.initialize(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-3, total_steps=20, cycle_momentum=False))
        rates, state = engine.get_lr(), engine.lr_scheduler.state_dict()
        self.assert_error("^lr_scheduler: OneCycleLR cannot be stepped 50 times, .*; give one for as many steps$",
                          engine.load_checkpoint, saved)
        self.assertEqual((0, rates, state), (engine.current_step, engine.get_lr(), engine.lr_scheduler.state_dict()))
        engine.load_checkpoint(saved, load_lr_scheduler_states=False)
        self.assertEqual((2, [3e-4]), (engine.current_step, engine.get_lr()))

    def test_OtherSettingsAreSaid(self):
        engine, snapshot = self.trained(1)
        engine.close()
        made = deepspeeds(snapshot, model(), 1)
        made.scheduler = None
        made.settings.append({**made.settings[0], "weight_decay": 0.0})
        saved = made.write(self.folder / "saved")
        adam = {"type": "AdamW", "params": {"lr": 5e-2, "betas": [0.5, 0.999], "weight_decay": 0.5}}

        def line(scheduler=None, **configured):
            loading = self.initialize(configuration=config(self.folder, **configured), lr_scheduler=scheduler)
            with self.assertLogs("spillway", logging.INFO) as logged:
                loading.load_checkpoint(saved)
            loading.close()
            return logged.records[-1].getMessage().partition("; ")[2].partition("; ")[2]

        self.assertEqual("trained otherwise from here: weight_decay 0.01, not 0 and 0.01", line())
        self.assertEqual("", line(spillway={"no_decay": True}))
        groups = [{"parameters": ["*.norm.*"], "weight_decay": 0, "lr": 1e-4}]
        self.assertEqual("trained otherwise from here: lr 0.0001 and 0.001, not 0.001",
                         line(spillway={"parameter_groups": groups}))
        self.assertEqual("trained otherwise from here: beta1 0.5, not 0.9; weight_decay 0.5, not 0 and 0.01; bf16, not "
                         "fp32; its learning rate 0.001 counts, not the configuration's 0.05; "
                         "optimizer.param_groups[0]['lr'] sets another", line(optimizer=adam, bf16={"enabled": True}))
        made.tag, made.settings[0]["lr"], made.settings[1]["lr"] = "automatic", 5e-5, 5e-5
        made.write(saved)
        adam = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}}  # 5e-5
        self.assertEqual("trained otherwise from here: lr 5e-05 and 0.0001, not 5e-05",
                         line(optimizer=adam, spillway={"parameter_groups": groups}))
        made.tag, made.scheduler = "later", {"last_epoch": 2}
        for group, rate in zip(made.settings, (2.5e-4, 2.5e-5)):
            group["lr"] = rate
        made.write(saved)
        self.assertEqual("", line(halving, spillway={"parameter_groups": groups}))  # whose rates a schedule moves, too


if __name__ == "__main__":
    main()
