"""Small real tokenizers, made here: nothing is downloaded, and tests/triton_models/tokens.py knows their ids."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = (
    "<s>", "</s>", "<|im_end|>", "<cut1>", "<cut2>", "<cut7>", "<late>", "<never>", "<slow>", "<inputs>", "<repeat>",
    "<endless>", "<r12>", "<r13>", "<r14>", "<r15>",
)  # fmt: skip
"""Ids 0 to 15."""
SAMPLE = (
    "  Grüße 🙂🙃, 𝔘nicode 漢字かな交じり文 👩‍👩‍👧 and\n\tdef f(x: int) -> int:\n        return x ** 2  # ok\n\n"
    '{"key": [1, 2.5, null]}  e\u0301 \u200d 한국어 العربية <END> trailing spaces   '
)


def byte_level(path: Path) -> Tokenizer:
    """A byte-level BPE, like GPT-2's and what followed, that puts `<s>` in front of a text; written to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE, SAMPLE], trainer)
    tokenizer.add_tokens(["<tool call>"])  # added, but part of the text
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(path))
    return tokenizer


def metaspace(path: Path) -> Tokenizer:
    """A BPE with byte fallback, like Llama 2's; written to `path`."""
    letters = ["▁", *sorted(set(SAMPLE) - set(" 🙂漢字"))]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁a", "nd"]
    merges = [("▁", "a"), ("n", "d")]
    tokenizer = Tokenizer(
        models.BPE({token: at for at, token in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path))
    return tokenizer
