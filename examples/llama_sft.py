"""Fine-tunes Llama, or another causal model, on prompts and completions: transformers' Trainer on a Spillway engine.

    python examples/llama_sft.py --model meta-llama/Llama-3.2-1B --output out --bf16

Data are lines of JSON: {"prompt": "…", "completion": "…"}. The loss counts completions alone. A tokenizer with a chat
template writes both as a conversation.
"""
import argparse
import json
import pathlib

import transformers

import spillway

HERE = pathlib.Path(__file__).parent


def tokens_of(prompt, completion, tokenizer, max_length):
    """A row whose labels are -100 where the prompt is."""
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        begin = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        text = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": completion}], tokenize=False)
        ask = tokenizer(begin, add_special_tokens=False)["input_ids"]
        answer = tokenizer(text.removeprefix(begin), add_special_tokens=False)["input_ids"]
    else:
        ask = tokenizer(prompt + "\n", add_special_tokens=False)["input_ids"]
        answer = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    ids = (ask + answer)[:max_length]
    return {"input_ids": ids, "labels": ([-100] * len(ask) + answer)[:max_length]}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, or a name on the hub")
    parser.add_argument("--output", required=True, help="for checkpoints and the trained model")
    parser.add_argument("--config", default=HERE / "ds_config.json", help="a ds_config.json; nvme_path is in it")
    parser.add_argument("--data", default=HERE / "data/instructions.jsonl")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    return parser.parse_args()


def main():
    args = arguments()
    transformers.set_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
    with open(args.data, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    rows = [tokens_of(line["prompt"], line["completion"], tokenizer, args.max_length) for line in lines]
    held_out = max(1, len(rows) // 10)
    trainer = spillway.Trainer(
        model=model, train_dataset=rows[:-held_out], eval_dataset=rows[-held_out:], spillway=args.config,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        on_existing="replace",  # the store of the run before may go; its checkpoints stay
        args=transformers.TrainingArguments(
            args.output, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation, learning_rate=args.lr, lr_scheduler_type="cosine",
            warmup_steps=2, weight_decay=0.01, bf16=args.bf16, use_cpu=args.cpu, eval_strategy="epoch",
            save_strategy="epoch", save_total_limit=2, logging_steps=1, report_to=[]))
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(args.output)  # as from_pretrained() takes it
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
