"""`spillway finetune` on GPUs that NCCL joins, all emulated: the bits of one GPU, and a GPU that dies on one rank."""
import os
import pathlib
import re
import subprocess
import sys

# Meson names the folder of all real plugins, for MPI's is among them, before what a test has in LD_LIBRARY_PATH.
os.environ["LD_LIBRARY_PATH"] = os.environ["SPILLWAY_EMULATED_PLUGINS"]
TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli"), str(TESTS / "emulated_gpu")]
from mpirun import ONE_HOST  # noqa: E402
from calls_test import STOPPING  # noqa: E402
from report import main  # noqa: E402
import runs  # noqa: E402
from runs import BINARY, CRASH, CliTest, Run, Workplace, sha256_of_model  # noqa: E402

MICRO_BATCHES = 2  # of a step, on all ranks
STEPS = 3


def on_ranks(command, ranks, variables=None):
    """`variables`: by rank, what its environment has besides."""
    line = [os.environ["SPILLWAY_MPIRUN"]]
    for rank in range(ranks):
        more = (variables or {}).get(rank, {})
        line += [":"] if rank > 0 else []
        line += ["-n", "1", "env", *(f"{name}={value}" for name, value in more.items()), BINARY, *command]
    done = subprocess.run(line, env=ONE_HOST, capture_output=True, text=True, timeout=200, check=False)
    return Run(done.returncode, done.stdout, done.stderr)


class NcclRanks(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()

    def command(self, place, ranks, groups=True, steps=STEPS, how=None, **config):
        section = {"sum_groups": MICRO_BATCHES} if groups else {}
        path = place.config(accumulation=MICRO_BATCHES // ranks, spillway_section=section, **config)
        return place.arguments(path, self.model, steps=steps, out=place.folder / "out", log=place.log, **(how or {}))

    def train(self, ranks, name, **how):
        place = Workplace(self.place.folder / f"{name}-{ranks}")
        command = self.command(place, ranks, **how)
        run = on_ranks(command, ranks) if ranks > 1 else runs.spillway(*command)
        self.assert_done(run)
        self.assertEqual(ranks > 1, "and NCCL 2." in run.out, run.out)
        return [(step["loss"], step["grad_norm"]) for step in place.steps()], sha256_of_model(place.folder / "out")

    def check(self, name, **config):
        wanted = self.train(1, name, **config)
        self.assertEqual(STEPS, len(wanted[0]))
        self.assertEqual(wanted, self.train(2, name, **config))

    def test_OneAndTwoTrainTheSameModelOnDrives(self):
        self.check("drives", parameters="nvme", states="nvme")

    def test_OneAndTwoTrainTheSameModelInHbm(self):
        self.check("hbm", parameters="none", states="none", zero_optimization={"stage": 1}, dtype="fp32", clip=0)

    def test_NcclsOwnSumsTrainToo(self):
        losses, _ = self.train(2, "fastest", groups=False, parameters="cpu", states="cpu")
        wanted, _ = self.train(1, "fastest", groups=False, parameters="cpu", states="cpu")
        for (loss, norm), (other, other_norm) in zip(losses, wanted, strict=True):
            self.assertAlmostEqual(loss, other, delta=2e-2)  # of losses near 5.5, in bf16
            self.assertAlmostEqual(norm / other_norm, 1, delta=2e-2)  # of gradients that are rounded to bf16 once

    def test_StepsAllocateNothingAndStopNothing(self):
        place = Workplace(self.place.folder / "calls")
        log = place.folder / "log"
        command = self.command(place, 2, parameters="nvme", states="nvme")
        self.assert_done(on_ranks(command, 2, {1: {"SPILLWAY_EMULATED_GPU_LOG": log}}))
        calls = log.read_text().splitlines()
        steps = [i for i, call in enumerate(calls) if call.startswith("product")]
        inside = calls[steps[0]:steps[-1]]
        for call in ("ncclSend", "ncclRecv", "ncclAllGather", "cuStreamWaitValue32"):
            self.assertIn(call, inside)
        self.assertEqual([], [call for call in inside if call.startswith(STOPPING)])
        self.assertEqual([], [call for call in calls if "pageable" in call or "default stream" in call])

    def run_without_gpu_on_rank_1(self, device):
        place = Workplace(self.place.folder / device)
        path = place.config(accumulation=1, spillway_section={"device": device}, parameters="cpu", states="cpu")
        command = place.arguments(path, self.model, steps=1, out=place.folder / "out", log=place.log)
        return on_ranks(command, 2, {1: {"LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": ""}})

    def test_AutoIsTheHostWhereNotEveryRankHasAGpu(self):
        run = self.run_without_gpu_on_rank_1("auto")
        self.assert_done(run)
        self.assertIn("spillway.device is auto, and all ranks use the CPU: rank 1 has no GPU (", run.err)
        self.assertNotIn("NCCL", run.out)

    def test_ARankWithoutAGpuIsNamed(self):
        run = self.run_without_gpu_on_rank_1("cuda")
        self.assertEqual(1, run.status, run.out)
        self.assertRegex(run.err, r"(?m)^spillway: rank 1: spillway\.device: is cuda, and there is none: ")

    def test_ARunWhoseGpuDiesOnOneRankEndsOnAllAndGoesOn(self):
        whole = self.train(2, "whole", parameters="nvme", states="nvme", steps=4)
        place = Workplace(self.place.folder / "dies")
        log = place.folder / "calls"
        config = {"parameters": "nvme", "states": "nvme", "steps": 4}
        self.assert_done(on_ranks(self.command(place, 2, **config), 2, {1: {"SPILLWAY_EMULATED_GPU_LOG": log}}))
        calls = log.read_text().splitlines()
        place.log.unlink()
        sends = [i for i, call in enumerate(calls) if call.startswith("ncclSend")]
        at = sends[len(sends) * 3 // 4]  # well before the end, since a run that is faster makes fewer calls: it polls
        fresh = self.command(place, 2, how={"fresh": True}, **config)
        died = on_ranks(fresh, 2, {1: {"SPILLWAY_EMULATED_GPU_DIES_AT": at}})
        self.assertNotEqual(0, died.status, died.out)
        self.assertIsNone(CRASH.search(died.out + died.err), died.err)
        self.assertRegex(died.err, re.compile(r"^spillway: .*(rank 1|GPU)", re.MULTILINE))
        self.assert_done(on_ranks(self.command(place, 2, how={"resume": True}, **config), 2))
        self.assertEqual(whole[1], sha256_of_model(place.folder / "out"))


if __name__ == "__main__":
    main()
