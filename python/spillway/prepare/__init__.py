"""`python -m spillway.prepare`: texts and conversations, made rows of tokens that
`spillway finetune` trains on. docs/data.md has its use and the format.

Nothing here needs PyTorch or the library. transformers, numpy and datasets are imported when they
are needed.
"""
