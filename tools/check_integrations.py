"""Trains tiny random models by LLaMA-Factory's or Axolotl's own command, and by the same with Spillway, and compares
the losses of ten steps and what is saved, as tools/integrations.sh has it done in each one's environment:

    python tools/check_integrations.py llamafactory|axolotl DIR [CASE...]

The two runs have the same YAML file, but for `deepspeed:`, which names Spillway's configuration, and Axolotl's line
`plugins:`. Prints a row of docs/integrations.md for each case; ends with 1 where a loss or a weight differs by more
than 1e-5.
"""
import argparse
import json
import os
import pathlib
import random
import runpy
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, TOLERANCE = 10, 1e-5
# A loss of two rewards' difference does not depend on it: its gradient is rounding, which Adam makes steps of.
WITHOUT_EFFECT = "v_head.summary.bias"
WORDS = "the a one cat dog bird sat ran flew on under over mat log tree and then it was is not seen".split()
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
# As LLaMA-Factory's and Axolotl's examples have it, with "auto" for what their own files say.
OFFLOAD = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
           "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
           "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"},
           "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                                 "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": False,
                                 "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                                 "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                                 "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                                 "stage3_gather_16bit_weights_on_model_save": True}}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
FACTORY = {
    "sft full": {"stage": "sft", "finetuning_type": "full"},
    "sft full, NVMe": {"stage": "sft", "finetuning_type": "full"},
    "sft lora": {"stage": "sft", **LORA},
    "sft qlora": {"stage": "sft", **LORA, "quantization_bit": 4, "quantization_method": "bnb"},
    "dpo full": {"stage": "dpo", "finetuning_type": "full", "pref_beta": 0.1},
    "dpo lora": {"stage": "dpo", **LORA, "pref_beta": 0.1},
    "pt full": {"stage": "pt", "finetuning_type": "full"},
    "kto lora": {"stage": "kto", **LORA},
    "rm lora": {"stage": "rm", **LORA},
}
# Axolotl switches its Triton kernels for LoRA on by itself, and they end with "Found no NVIDIA driver" without a GPU.
AXOLOTL_LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True,
                "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
AXOLOTL = {
    "full": {},
    "full, NVMe": {},
    "lora": AXOLOTL_LORA,
    "qlora": {**AXOLOTL_LORA, "adapter": "qlora", "load_in_4bit": True},
}


def sentence(chance, length=12):
    return " ".join(chance.choice(WORDS) for _ in range(length))


def make_model(folder):
    """A Llama of random weights, whose tokens are words."""
    import tokenizers
    import torch
    import transformers
    words = [*WORDS, "user", "assistant", "system", "Human", "Assistant", ":", "<pad>", "<eos>", "<unk>"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>",
                                                     unk_token="<unk>", model_max_length=128)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, pad_token_id=words.index("<pad>"),
        eos_token_id=words.index("<eos>")))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(folder):
    chance = random.Random(1)
    chats = [[{"role": "user", "content": sentence(chance)}, {"role": "assistant", "content": sentence(chance)}]
             for _ in range(96)]
    columns = {"prompt": "instruction", "response": "output"}
    sets = {
        "sft": ([{"instruction": chat[0]["content"], "output": chat[1]["content"]} for chat in chats],
                {"columns": columns}),
        "pt": ([{"text": sentence(chance, 40)} for _ in chats], {"columns": {"prompt": "text"}}),
        "dpo": ([{"instruction": chat[0]["content"], "chosen": chat[1]["content"], "rejected": sentence(chance)}
                 for chat in chats],
                {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}),
        "kto": ([{"instruction": chat[0]["content"], "output": chat[1]["content"], "label": i % 2 == 0}
                 for i, chat in enumerate(chats)], {"columns": {**columns, "kto_tag": "label"}}),
        "chat": ([{"messages": chat} for chat in chats], {"columns": {"messages": "messages"}}),
    }
    for name, (rows, _) in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {name: {"file_name": f"{name}.jsonl", **form} for name, (_, form) in sets.items()}
    (folder / "dataset_info.json").write_text(json.dumps(described))


def factory_recipe(work, case, output):
    stage = FACTORY[case]["stage"]
    return {"model_name_or_path": str(work / "model"), "do_train": True, "dataset_dir": str(work),
            "dataset": {"rm": "dpo"}.get(stage, stage), "template": "default", "cutoff_len": 64,
            "output_dir": str(output), "overwrite_output_dir": True, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2,
            "weight_decay": 0.01, "max_steps": STEPS, "logging_steps": 1, "save_steps": 5, "report_to": "none",
            "preprocessing_num_workers": 1, **FACTORY[case]}


def axolotl_recipe(work, case, output):
    return {"base_model": str(work / "model"), "datasets": [{"path": str(work / "chat.jsonl"), "ds_type": "json",
                                                             "type": "chat_template"}],
            "chat_template": "tokenizer_default", "dataset_prepared_path": str(output / "prepared"),
            "output_dir": str(output), "sequence_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
            "max_steps": STEPS, "optimizer": "adamw_torch", "lr_scheduler": "cosine", "learning_rate": 1e-3,
            "warmup_steps": 2, "weight_decay": 0.01, "bf16": False, "fp16": False, "tf32": False,
            "logging_steps": 1, "save_steps": 5, "attn_implementation": "sdpa", "gradient_checkpointing": True,
            "val_set_size": 0, "seed": 1, **AXOLOTL[case]}


def record(path, module, arguments):
    """Runs a module as `python -m` does, and writes every micro-batch's loss, which logs round. Axolotl seeds nothing
    before it makes adapters: two runs of it differ by their random values, so these are seeded here."""
    import peft
    import torch
    import transformers
    losses, step, adapted = [], transformers.Trainer.training_step, peft.get_peft_model

    def get_peft_model(*values, **keywords):
        torch.manual_seed(3)
        return adapted(*values, **keywords)

    def training_step(self, *values, **keywords):
        loss = step(self, *values, **keywords)
        losses.append(float(loss))
        return loss

    transformers.Trainer.training_step, peft.get_peft_model = training_step, get_peft_model
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        path.write_text(json.dumps(losses))


def run(recipe, output, module, words):
    """The losses. `words`: what stands before the file's name."""
    import yaml
    output.mkdir(parents=True, exist_ok=True)
    file, losses = output / "recipe.yaml", output / "losses.json"
    file.write_text(yaml.safe_dump(recipe))
    losses.unlink(missing_ok=True)
    quiet = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
             "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
             "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])}
    with open(output / "log", "w") as log:
        ended = subprocess.run([sys.executable, __file__, "--record", losses, module, *words, file],
                               env=os.environ | quiet, stdout=log, stderr=log, check=False)
    if ended.returncode:
        sys.exit(f"{output / 'log'}: ended with {ended.returncode}\n" + (output / "log").read_text()[-3000:])
    return json.loads(losses.read_text())


def configure(folder, on_nvme):
    """The path of a ds_config.json: weights and states in host memory, or in a folder that stands for a drive's."""
    made, place = json.loads(json.dumps(OFFLOAD)), {"device": "nvme", "nvme_path": str(folder / "store")}
    if on_nvme:
        shutil.rmtree(folder / "store", ignore_errors=True)
        made["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
    (folder / "ds_config.json").write_text(json.dumps(made))
    return folder / "ds_config.json"


def saved_apart(plain, found):
    """The largest difference of what the two runs have saved at their end."""
    import safetensors.torch
    names = sorted(path.name for path in plain.glob("*.safetensors"))
    if not names or names != sorted(path.name for path in found.glob("*.safetensors")):
        sys.exit(f"{found}: does not hold the files of weights of {plain}: {names}")
    worst = 0.0
    for name in names:
        one, other = (safetensors.torch.load_file(folder / name) for folder in (plain, found))
        if set(one) != set(other):
            sys.exit(f"{found / name}: has other tensors than {plain / name}")
        worst = max([worst, *(float((one[key].float() - other[key].float()).abs().max()) for key in one
                              if key != WITHOUT_EFFECT)])
    return worst


def compare(program, work, case):
    """Whether the losses are equal."""
    folder = work / case.replace(",", "").replace(" ", "-")
    folder.mkdir(exist_ok=True)
    configuration = configure(folder, "NVMe" in case)
    if program == "llamafactory":
        plain = run(factory_recipe(work, case, folder / "plain"), folder / "plain", "llamafactory.cli", ["train"])
        recipe = {**factory_recipe(work, case, folder / "spillway"), "deepspeed": str(configuration)}
        found = run(recipe, folder / "spillway", "spillway.integrations.llamafactory", ["train"])
    else:
        plain = run(axolotl_recipe(work, case, folder / "plain"), folder / "plain", "axolotl.cli.train", [])
        recipe = {**axolotl_recipe(work, case, folder / "spillway"), "deepspeed": str(configuration),
                  "plugins": ["spillway.integrations.axolotl.SpillwayPlugin"]}
        found = run(recipe, folder / "spillway", "axolotl.cli.train", [])
    if len(plain) != len(found) or len(plain) < STEPS:
        sys.exit(f"{folder}: {len(plain)} and {len(found)} losses")
    worst = max(abs(a - b) / abs(a) for a, b in zip(plain, found))
    weights = saved_apart(folder / "plain", folder / "spillway")
    print(f"| {case} | {plain[0]:.6f} | {plain[-1]:.6f} | {'equal' if plain[0] == found[0] else 'differ'} | "
          f"{worst:.1e} | {weights:.1e} |", flush=True)
    return worst <= TOLERANCE and weights <= TOLERANCE


def main():
    if sys.argv[1:2] == ["--record"]:
        record(pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("llamafactory", "axolotl"))
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    known = FACTORY if arguments.program == "llamafactory" else AXOLOTL
    if unknown := set(arguments.cases) - set(known):
        parser.error(f"{', '.join(unknown)}: cases are {', '.join(known)}")
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model")
    make_data(work)
    print(f"| {arguments.program} | first loss | last loss | the first ones | losses, relative | saved weights |")
    print("|---|---|---|---|---|---|")
    equal = [compare(arguments.program, work, case) for case in arguments.cases or known]
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
