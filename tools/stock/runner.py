"""A Python that imports what scripts import, and runs each in a child of its own: `python -m stock.runner`.

It reads requests from standard input and answers each with an exit status, a line of JSON each. {"make": [...]} makes
models and data sets. Another one names a script, its words, its folder, how many processes run it, as torchrun starts
them, and what the files of their losses are called: there process r notes in NAME.r every loss that goes backward with
all of its digits, or another number that a trainer logs. Output goes to log.r. What a hub would bring is not there:
`evaluate` computes nothing.
"""
import importlib
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import types

IMPORTED = ("torch", "numpy", "datasets", "accelerate", "transformers", "transformers.trainer",
            "transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft", "trl",
            "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "lightning",
            "torchvision")


def note(path, watch):
    """`watch`: "loss", or what a trainer of transformers' logs, "grad_norm"."""
    import torch
    backward = torch.Tensor.backward

    def write(value):
        with open(path, "a") as file:
            file.write(json.dumps(value) + "\n")

    def noted(self, *arguments, **keywords):
        if self.numel() == 1:
            write(self.detach().double().item())
        return backward(self, *arguments, **keywords)

    if watch == "loss":
        torch.Tensor.backward = noted
    else:
        import transformers
        log = transformers.Trainer.log
        transformers.Trainer.log = lambda self, logs, *more, **named: (
            write(float(logs[watch])) if watch in logs else None, log(self, logs, *more, **named))[1]


def nothing_of_a_hub():
    metrics = types.ModuleType("evaluate")
    metrics.__spec__ = importlib.machinery.ModuleSpec("evaluate", None)
    metrics.load = lambda *_, **__: types.SimpleNamespace(compute=lambda **_: {})
    sys.modules["evaluate"] = metrics
    try:
        import nltk
        nltk.data.find = lambda *_, **__: True
    except ImportError:
        pass


def seed():
    """For scripts that do not."""
    import random

    import numpy
    import torch
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)


def run(request, rank):
    os.chdir(request["folder"])
    log = os.open(f"log.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv, sys.path[:0] = [request["script"], *request["words"]], request["path"]
    os.environ.update(request["environment"])
    if request["processes"] > 1:
        os.environ.update(WORLD_SIZE=str(request["processes"]), RANK=str(rank), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
    nothing_of_a_hub()
    note(f"{request['losses']}.{rank}", request["watch"])
    seed()
    runpy.run_path(request["script"], run_name="__main__")


def make(request):
    from . import models, sets
    for folder, room, kind in request["make"]:
        {"models": models, "data": sets}[room].make(kind, folder)


def child(request, rank):
    status = 1
    try:
        if "make" in request:
            make(request)
        else:
            run(request, rank)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answer(request):
    """The status of the first process that fails, after which the others are ended; else 0."""
    request, running, first = {"port": free_port(), **request}, set(), 0
    for rank in range(request.get("processes", 1)):
        pid = os.fork()
        if pid == 0:
            child(request, rank)
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if not first and (first := os.waitstatus_to_exitcode(status)):
            for each in running:
                os.kill(each, signal.SIGKILL)
    return first


def main():
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError as error:  # a row that needs it says so
            print(f"runner: {name}: {error}", file=sys.stderr)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
