"""What each process of trainer_ranks_test.py does: cases in turn, given as JSON, each with a folder of its own.

A case leaves `rank<r>.pt` there: what the trainer said, and the weights.
"""
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import trainer_test as one  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402

if not hasattr(torch.cpu, "device_count"):  # accelerate 0.33 asks, and PyTorch before 2.1 does not say
    torch.cpu.device_count, torch.cpu.set_device = (lambda: 1), (lambda device: None)
RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ROWS = 4  # of a micro-batch, on all ranks together


class Spilled(one.Recording, spillway.Trainer):
    pass


def rows(count, masked, seed=5):
    """`masked`: of each another number of tokens counts, so that a mean over ranks is not one over tokens."""
    made = one.examples(count, seed)
    return made if masked else [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in made]


def trainer(folder, dropout=0.0, plain=False, masked=False, rank_rows=None, store="store", adapted=False, own=None,
            examples=28, batch="auto", **more):
    network = one.model(kind="llama", attention_dropout=dropout)
    if adapted:
        import peft
        network = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    values = {"per_device_train_batch_size": rank_rows or ROWS // COUNT, "gradient_accumulation_steps": 3,
              "num_train_epochs": 2, "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 2,
              "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
              "per_device_eval_batch_size": 2, "use_cpu": True, **more}
    arguments = transformers.TrainingArguments(output_dir=str(pathlib.Path(folder, "out")), **values)
    data = {"train_dataset": rows(examples, masked), "eval_dataset": rows(5 if masked else 8, masked, 6)}
    if plain:
        made = one.Plain(model=network, args=arguments, **data)
    else:
        place = {"device": "nvme", "nvme_path": str(pathlib.Path(folder, store))}
        made = Spilled(model=network, args=arguments, **data, spillway={
            "train_batch_size": batch, "zero_optimization": {
                "stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"tile_elements": 4096, "device": "host", **(own or {})}})
    made.remove_callback(transformers.PrinterCallback)
    return made


def weights_of(made):
    return made.engine.master_weights() if hasattr(made, "engine") else {
        name: value.detach().clone() for name, value in made.model.named_parameters()}


def train(folder, resume=None, save=False, result="", plain=False, **options):
    """`resume`: as for resume_from_checkpoint."""
    made = trainer(folder, plain=plain, **options)
    if not (plain or resume):  # of transformers 5 the plain one then forgets to share gradients
        made.evaluate()
    transformers.set_seed(7)
    made.train(resume_from_checkpoint=resume)
    if save:
        made.save_model()
    made.evaluate()
    found = {"weights": weights_of(made), "losses": made.losses, "step": made.state.global_step,
             "predictions": None if options.get("adapted") else torch.as_tensor(made.predict(rows(7, False, 8))[0]),
             **{name: made.logged(name) for name in ("loss", "grad_norm", "learning_rate", "eval_loss")}}
    if not plain:
        found["batch"] = made.engine.settings["train_batch_size"]
        made.engine.close()
    torch.save(found, pathlib.Path(folder, f"{result}rank{RANK}.pt"))


def refused(folder):
    said = []
    for options in ({"accelerator_config": {"even_batches": False}, "save_on_each_node": True},
                    {"own": {"sum_groups": 3}}, {"batch": 6}):
        try:
            trainer(folder, **options)
        except spillway.Error as error:
            said.append(str(error))
    pathlib.Path(folder, f"refused{RANK}.json").write_text(json.dumps(said))


def generate(folder):
    """Of another length on each rank."""
    def written(model):
        ids = torch.arange(1, 4)[None] + RANK
        return [model.generate(ids, max_new_tokens=3 + 4 * RANK, do_sample=False, pad_token_id=0, eos_token_id=None,
                               **options) for options in ({}, {"num_beams": 2}, {"synced_gpus": False})]

    expected = written(one.model(kind="llama").eval())
    made = trainer(folder, max_steps=1)
    made.evaluate()  # which makes the engine
    found = written(made.model.eval())
    made.engine.close()
    pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps(
        [[each.tolist() for each in way] for way in (expected, found)]))


def main():
    for case in json.loads(sys.argv[1]):
        {"train": train, "refused": refused, "generate": generate}[case.pop("case")](**case)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
