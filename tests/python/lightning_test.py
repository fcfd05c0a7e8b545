"""Lightning's Trainer on Spillway: the bits of a hand-written loop, and what its users rely on."""
import unittest

import lightning_case  # first: where there is no Lightning, it ends the program
from case import main
from lightning_case import PACKAGES, Body, LightningCase, by_hand, loader, module

import torch

import spillway
from toy_model import batches

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}}


class Training(LightningCase):
    def hand(self, body=Body, accumulation=1, clipping=0, optimizer=None, schedule=None, made=None, **more):
        configuration = self.configuration("hand", train_micro_batch_size_per_gpu=1, gradient_clipping=clipping,
                                           gradient_accumulation_steps=accumulation,
                                           optimizer=optimizer or OPTIMIZER, **more)
        return by_hand(self, (made or module(body=body)), configuration, schedule, accumulation=accumulation)

    def test_BothPackagesGiveTheBitsOfALoopByHand(self):
        losses, weights, _ = self.hand()
        for name, package in PACKAGES.items():
            made = self.fit(module(package), self.trainer(self.configuration(name), package))
            self.assertEqual(losses, made.losses)
            self.assert_weights(weights, made.state_dict())
            trainer = made.trainer
            self.assertEqual(8, trainer.global_step)
            self.assertEqual(8, trainer.strategy.engine.current_step)
            self.assertEqual(name, trainer.strategy.package)

    def test_TheNameAlone(self):
        _, weights, _ = self.hand()
        for package in PACKAGES.values():
            made = self.fit(module(package), self.plain(package, strategy="spillway"))
            self.assert_weights(weights, made.state_dict())


if __name__ == "__main__":
    main()
