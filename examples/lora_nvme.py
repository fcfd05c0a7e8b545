"""Trains LoRA adapters (peft) over a base that neither GPU nor RAM has room for: its weights stay on NVMe, frozen.

    python examples/lora_nvme.py --model DIR --output adapters

DIR holds config.json, the tokenizer and *.safetensors, as downloads have them. The model is made without values, and
the engine reads them from the files, tensor by tensor. Data are lines of JSON: {"prompt": "…", "completion": "…"}.
"""
import argparse
import json
import math
import pathlib
import random

import accelerate
import peft
import safetensors
import torch
import transformers

import spillway

HERE = pathlib.Path(__file__).parent


def adapted_model(folder, rank, targets):
    """On device meta: names and shapes alone."""
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets,
                                                           task_type="CAUSAL_LM"))
    model.tie_weights()
    return model


def weights_of(model, folder):
    """A function from a parameter's name to its values: of the base out of files, of adapters as peft begins them."""
    files = [safetensors.safe_open(path, "pt") for path in sorted(pathlib.Path(folder).glob("*.safetensors"))]
    place = {name: file for file in files for name in file.keys()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def values(name):
        if "lora_A" in name:
            return torch.nn.init.kaiming_uniform_(torch.empty(shapes[name]), a=math.sqrt(5))
        if "lora_B" in name:
            return torch.zeros(shapes[name])
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        return place[name].get_tensor(name)
    return values


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--output", required=True, help="for the adapters")
    parser.add_argument("--config", default=HERE / "ds_config.json", help="a ds_config.json; nvme_path is in it")
    parser.add_argument("--data", default=HERE / "data/instructions.jsonl")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on with the store's last step")
    return parser.parse_args()


def rows_of(path, tokenizer, max_length):
    """Tokens of every line; padding is left out of the loss."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    texts = [f"{line['prompt']}\n{line['completion']}{tokenizer.eos_token}" for line in lines]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:max_length] for text in texts]
    return [{"input_ids": ids, "labels": list(ids)} for ids in rows]


def configuration(args):
    with open(args.config, encoding="utf-8") as file:
        config = json.load(file)
    config.update(train_micro_batch_size_per_gpu=args.batch, gradient_accumulation_steps=args.accumulation,
                  bf16={"enabled": args.bf16})
    config["optimizer"]["params"] = {"lr": args.lr, "weight_decay": 0.0}
    return config


def main():
    args = arguments()
    torch.manual_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = rows_of(args.data, tokenizer, args.max_length)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)

    model = adapted_model(args.model, args.rank, args.targets)
    engine = spillway.Engine(model, configuration(args), weights=weights_of(model, args.model),
                             on_existing="resume" if args.resume else "replace")
    engine.train()
    for step in range(engine.current_step, args.steps):
        shuffled = random.Random(step)  # follows from the step, so that a run that is resumed sees what it would have
        for _ in range(args.accumulation):
            batch = collate(shuffled.sample(rows, args.batch)).to(engine.device)
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            report = engine.step()
        print(f"step {report.step}  loss {loss.item():.4f}  norm {report.gradient_norm:.3f}  "
              f"read {report.nvme_read_bytes / 2**20:.1f} MiB  written {report.nvme_write_bytes / 2**20:.1f} MiB")
    engine.export(args.output, replace=True)  # adapter_model.safetensors and adapter_config.json, as peft saves them
    engine.close()


if __name__ == "__main__":
    main()
