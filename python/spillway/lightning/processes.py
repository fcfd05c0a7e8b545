"""What a Trainer asks of a strategy with several processes, each of which is a rank of the engine:
ProcessesMixin.

They are the Trainer's own (devices= starts the script once more for each), or torchrun's, or a
cluster's, as Lightning finds them. They talk over torch.distributed: over Gloo on CPUs, over NCCL
with a GPU each.
"""
import importlib

import torch

from ..library import DEVICES, Error

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class ProcessesMixin:
    """In front of Lightning's ParallelStrategy, which says rank and number of processes by the
    cluster's environment that a Trainer sets."""

    _devices, _num_nodes = None, 1

    def _fabric(self, name):
        """A module of Lightning's Fabric, beside the package that the Trainer is of."""
        return importlib.import_module(f"{FABRIC[self.package]}.{name}")

    # -- what a Trainer sets -----------------------------------------------------------------------

    @property
    def parallel_devices(self):
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices):
        self._devices = devices

    @property
    def num_nodes(self):
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, count):
        self._num_nodes = count

    @property
    def num_processes(self):
        """On this machine."""
        return len(self._devices or (None,))

    @property
    def processes(self):
        """In all."""
        return self.num_processes * self._num_nodes

    @property
    def is_distributed(self):
        """Whether loaders get a DistributedSampler."""
        return self.processes > 1

    @property
    def root_device(self):
        """This process's."""
        if not self._devices:
            return torch.device("cpu")
        return self._devices[self.local_rank % len(self._devices)]

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.processes, "rank": self.global_rank}

    def set_world_ranks(self):
        if self.is_distributed:
            environment = self.cluster_environment
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.processes)
            rank_zero = importlib.import_module("lightning_utilities.core.rank_zero")
            rank_zero.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self):
        if self.is_distributed:
            script = self._of("strategies.launchers.subprocess_script")
            self._launcher = script._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self._num_nodes)

    def setup_environment(self):
        if self.root_device.type not in DEVICES.values():
            raise Error("unsupported", f"accelerator: {self.root_device.type}; training is on "
                                       f"{' or '.join(DEVICES.values())}")
        super().setup_environment()
        if self.is_distributed:
            self._fabric("utilities.seed").reset_seed()
            self.set_world_ranks()
            backend = "nccl" if self.root_device.type == "cuda" else "gloo"
            self._fabric("utilities.distributed")._init_dist_connection(self.cluster_environment,
                                                                        backend)

    # -- what they tell each other -----------------------------------------------------------------

    def barrier(self, *_, **__):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            named = self.root_device.type == "cuda" and "nccl" in torch.distributed.get_backend()
            torch.distributed.barrier(device_ids=[self.root_device.index] if named else None)

    def broadcast(self, obj, src=0):
        if not self.is_distributed or not torch.distributed.is_initialized():
            return obj
        found = [obj]
        torch.distributed.broadcast_object_list(found, src)
        return found[0]

    def reduce(self, tensor, group=None, reduce_op="mean"):
        if not self.is_distributed or not torch.is_tensor(tensor):
            return tensor
        return self._fabric("utilities.distributed")._sync_ddp_if_available(tensor, group,
                                                                            reduce_op)

    def teardown(self):
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
