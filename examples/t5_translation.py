"""Fine-tunes T5 to translate, and evaluates by beam search: transformers' Seq2SeqTrainer on a Spillway engine.

    python examples/t5_translation.py --model google-t5/t5-small --output out

Data are lines of JSON as the WMT sets have them: {"translation": {"en": "…", "de": "…"}}. BLEU is shown where sacrebleu
is installed. What is trained where, and with which budgets, is the configuration's.
"""
import argparse
import json
import pathlib

import numpy
import transformers

import spillway

HERE = pathlib.Path(__file__).parent


class Trainer(spillway.trainer.Mixin, transformers.Seq2SeqTrainer):
    """Seq2SeqTrainer, whose model's weights, gradients and optimizer states are Spillway's."""


def rows_of(path, tokenizer, args):
    """Tokens of both sides of every line."""
    with open(path, encoding="utf-8") as file:
        pairs = [json.loads(line)["translation"] for line in file if line.strip()]
    prefix = f"translate {args.source_name} to {args.target_name}: "  # as T5 was trained
    return [tokenizer(prefix + pair[args.source], text_target=pair[args.target], max_length=args.max_length,
                      truncation=True) for pair in pairs]


def metrics(tokenizer):
    try:
        import sacrebleu
    except ImportError:
        sacrebleu = None
        print("sacrebleu is not installed: evaluations show no BLEU")

    def compute(predicted):
        texts = []
        for ids in (predicted.predictions, predicted.label_ids):
            ids = numpy.where(ids < 0, tokenizer.pad_token_id, ids)  # -100 is padding
            texts.append([text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)])
        found = {"exact": float(numpy.mean([one == other for one, other in zip(*texts)]))}
        if sacrebleu is not None:
            found["bleu"] = sacrebleu.corpus_bleu(texts[0], [texts[1]]).score
        return found
    return compute


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, or a name on the hub")
    parser.add_argument("--output", required=True, help="for checkpoints and the trained model")
    parser.add_argument("--config", default=HERE / "ds_config.json", help="a ds_config.json; nvme_path is in it")
    parser.add_argument("--data", default=HERE / "data/en_de.jsonl")
    parser.add_argument("--eval-data", help="the last eighth of --data, if it is not given")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--source-name", default="English")
    parser.add_argument("--target-name", default="German")
    parser.add_argument("--max-length", type=int, default=128, help="tokens of a side")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    return parser.parse_args()


def main():
    args = arguments()
    transformers.set_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(args.model)
    rows = rows_of(args.data, tokenizer, args)
    held_out = len(rows) // 8
    train, test = (rows, rows_of(args.eval_data, tokenizer, args)) if args.eval_data else \
        (rows[:-held_out], rows[-held_out:])
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = Trainer(
        model=model, train_dataset=train, eval_dataset=test, data_collator=collator,
        compute_metrics=metrics(tokenizer), spillway=args.config, on_existing="replace",
        # T5's embedding runs twice, in the encoder and the decoder: a forward pass shows it to the plan.
        example=dict(collator(train[:1])),
        args=transformers.Seq2SeqTrainingArguments(
            args.output, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation, learning_rate=args.lr, bf16=args.bf16, use_cpu=args.cpu,
            eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, load_best_model_at_end=True,
            predict_with_generate=True, generation_num_beams=args.beams, generation_max_length=args.max_length,
            logging_steps=1, report_to=[]))
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(args.output)
    tokenizer.save_pretrained(args.output)
    found = trainer.predict(test)
    texts = tokenizer.batch_decode(numpy.maximum(found.predictions, 0), skip_special_tokens=True)
    for row, text in zip(test, texts):
        print(f"{tokenizer.decode(row['input_ids'], skip_special_tokens=True)}  ->  {text}")


if __name__ == "__main__":
    main()
