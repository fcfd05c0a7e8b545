"""Axolotl's trainer with an engine below it, by one line of its YAML file:

    plugins: [spillway.integrations.axolotl.SpillwayPlugin]

What the file says of `deepspeed:` is Spillway's configuration, and DeepSpeed is not asked.
"""
import logging

from axolotl.integrations.base import BasePlugin

from .. import log
from ..library import Error
from ..trainer import Mixin
from . import recipes

NAME = f"{__name__}.SpillwayPlugin"
# Keys of the file that make another trainer, another optimizer or another place for what is kept.
LOOPS = ("rl", "reward_model", "process_reward_model", "trainer_cls")
RATES = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups")
PLACES = ("fsdp", "fsdp_config", "activation_offloading", "gpu_memory_limit", "layer_offloading", "use_ray")


def check(cfg):
    """Refuses what would not be trained by the engine. The Mixin checks TrainingArguments."""
    recipes.refuse("Axolotl", [
        *((cfg.get(key), f"{key}: {cfg.get(key)} has a trainer that a plugin cannot give; full models, LoRA and QLoRA "
                         "are trained") for key in LOOPS),
        *((cfg.get(key) is not None, f"{key}: leave it out; parameter_groups in the configuration have rates of "
                                     "their own") for key in RATES),
        *((cfg.get(key), f"{key}: leave it out; the tiers of the configuration take its place") for key in PLACES),
        (cfg.get("fp8"), "fp8: is computed by accelerate; say bf16 or fp16"),
    ])


class SpillwayPlugin(BasePlugin):
    """Named by the YAML file; Axolotl makes it."""

    def __init__(self):
        super().__init__()
        self._configuration = None

    def register(self, cfg):
        """Comes before Axolotl looks at the file, which takes `deepspeed:` out of its sight."""
        check(cfg)
        self._configuration = recipes.configuration(cfg.pop("deepspeed", None))
        if cfg.get("gradient_checkpointing"):
            cfg["gradient_checkpointing"] = False
            log.say(logging.INFO, "gradient_checkpointing: is done by the engine, block by block")

    def load_datasets(self, cfg, preprocess=False):
        """Comes before a model is loaded to be trained, and not where one is to write text. The engine
        takes weights from host memory; quantized ones are made where Axolotl makes them."""
        if not preprocess and not cfg.get("load_in_4bit") and not cfg.get("load_in_8bit"):
            cfg["device_map"] = "cpu"

    def get_input_args(self):
        return f"{__name__}_keys.SpillwayArgs"

    def get_trainer_cls(self, cfg):
        from axolotl.core.trainers import AxolotlTrainer
        return recipes.trainer_of(AxolotlTrainer, self._configuration, cfg.get("spillway_on_existing"),
                                  "spillway_on_existing: replace")

    def post_trainer_create(self, cfg, trainer):
        if not isinstance(trainer, Mixin):
            raise Error("unsupported", f"plugins: the trainer is {type(trainer).__name__}, of another plugin; leave "
                                       f"that one out, or name {NAME} before it")
        model = trainer.model
        saved = model.save_pretrained

        def save_pretrained(directory, *arguments, **keywords):
            """Of Axolotl, when all is done. The trainer's way to save is the one that has values."""
            if trainer.engine is None or "state_dict" in keywords:
                return saved(directory, *arguments, **keywords)
            return trainer.save_model(directory)

        model.save_pretrained = save_pretrained
