"""What a loop written for DeepSpeed asks its engine, by DeepSpeed's names: a part of DeepSpeedEngine."""
import os

import torch

ELSEWHERE = {  # what an engine of DeepSpeed's has, and what is called here
    "allreduce_gradients": "leave it out, gradients of several processes are added up in backward()",
    "coalesce_grad_reduction": "leave it out and set gradient_accumulation_steps to the backward passes of a step, as "
                               "ranks add up gradients once a step",
    "deepspeed_io": "make a torch.utils.data.DataLoader, or give training_data= to initialize()",
    "scale": "call backward(loss), which scales it, in place of loss.backward()",
}


class Answers:
    global_samples = skipped_steps = 0  # of the run; skipped ones as far as checkpoints tell
    micro_steps = 0                     # calls of step(), of this engine

    def __getattr__(self, name):
        if name in ELSEWHERE and not hasattr(self.__dict__.get("module"), name):
            raise AttributeError(f"{name}: is DeepSpeed's, and not here; {ELSEWHERE[name]}")
        return super().__getattr__(name)

    def _count(self, report, made):
        """Of a call of step(), after so many micro-batches."""
        self.micro_steps += 1
        if report is not None:
            self.global_samples += self.train_micro_batch_size_per_gpu() * made * self._processes
            self.skipped_steps += report.skipped

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def world_size(self):
        return self._processes

    @property
    def global_rank(self):
        return self.ranks.rank if self.ranks else 0

    @property
    def local_rank(self):
        return int(os.environ.get("LOCAL_RANK") or 0) if self.ranks else 0

    # -- batches and rates --------------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self):
        return self._accumulation

    def train_micro_batch_size_per_gpu(self):
        return self._library.config_micro_batch(self._config)

    def train_batch_size(self):
        return self.train_micro_batch_size_per_gpu() * self._accumulation * self._processes

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self):
        """Adam's or Lion's betas of each group, SGD's momentum; 0 where the optimizer has neither."""
        name = "betas" if "optimizer.params.betas" in self.settings else "momentum"
        usual = self.optimizer.known.get(name, self.settings.get(f"optimizer.params.{name}", 0.0))
        found = [group.get(name, usual) for group in self.optimizer.param_groups]
        return [tuple(each) if isinstance(each, list) else each for each in found]

    # -- settings -----------------------------------------------------------------------------------------------------

    def zero_optimization(self):
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self):
        return self.settings.get("zero_optimization.stage", 0)

    def bfloat16_enabled(self):
        return self.dtype == torch.bfloat16

    def fp16_enabled(self):
        return self.dtype == torch.float16

    def loss_scale(self):
        """The configuration's, as DeepSpeed's: 0 is dynamic. That of the moment is optimizer.cur_scale."""
        return self.settings["fp16.loss_scale"]

    def dynamic_loss_scale(self):
        return self.loss_scale() == 0

    def gradient_clipping(self):
        return self.settings["gradient_clipping"]
