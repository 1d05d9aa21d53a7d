"""Step 1: the training corpus and the tokenizer.

Two sources, both reproducible with the same Python version:
    library        sources of the running interpreter's standard library (PSF-2.0), every 20th file held out
    conversations  the seeded templates, about one question in fifty held out (conversations.py)

Writes tokenizer.json; library_{train,val}.bin (uint16 token ids, each file after an <|endoftext|>);
chat_{train,val}.bin (each conversation before one); questions.json (held-out questions with the templates'
answers, by kind); corpus.json (counts and SHA-256 of the token streams).
"""

import argparse
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
from conversations import split
from presets import END_OF_TEXT, PRESETS, SPECIAL_TOKENS, VOCABULARY
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specplug.local.library import held_out, library_files

# newline and indentation | word | one digit | run of punctuation | spaces
WORDS = r"\n[ ]*| ?[A-Za-z_]+| ?\d| ?[^\sA-Za-z_\d]+|[ ]+|\s"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE whose first ids are the special tokens.

    The later steps take an answer's header for three tokens; raises ValueError where it is not.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    for word in ("assistant", "\n"):
        if len(tokenizer.encode(word).ids) != 1:
            raise ValueError(
                f"tokenizer: expected {word!r} to be one token; give it more conversations to learn from"
            )
    return tokenizer


def write_stream(file: Path, texts: list[str], tokenizer: Tokenizer, *, end_first: bool) -> dict[str, Any]:
    """Write texts as one stream of token ids, an <|endoftext|> before or after each; returns its facts."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [END_OF_TEXT, *encoding.ids] if end_first else [*encoding.ids, END_OF_TEXT]
    stream = np.array(ids, dtype=np.uint16)
    stream.tofile(file)
    return {
        "documents": len(texts),
        "tokens": len(ids),
        "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line; run.py passes its arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--seed", type=int, default=7)
    a = parser.parse_args(arguments)
    preset = PRESETS[a.preset]
    a.out.mkdir(parents=True, exist_ok=True)

    files = library_files(preset.library_files)
    library = {
        "train": [text for i, (_, text) in enumerate(files) if not held_out(i)],
        "val": [text for i, (_, text) in enumerate(files) if held_out(i)],
    }
    train, val = split(preset.documents, a.seed)
    chat = {"train": [c.text() for c in train], "val": [c.text() for c in val]}
    tokenizer = train_tokenizer(library["train"] + chat["train"][:20_000])
    tokenizer.save(str(a.out / "tokenizer.json"))

    facts: dict[str, Any] = {"python": platform.python_version(), "seed": a.seed, "vocabulary": VOCABULARY}
    for part in ("train", "val"):
        for name, texts, end_first in (("library", library[part], True), ("chat", chat[part], False)):
            file = a.out / f"{name}_{part}.bin"
            facts[f"{name}_{part}"] = write_stream(file, texts, tokenizer, end_first=end_first)
    facts["held_out_files"] = [name for i, (name, _) in enumerate(files) if held_out(i)]
    questions: dict[str, list[dict[str, str]]] = {}
    for kind, turns, _ in val:
        questions.setdefault(kind, []).append({"question": turns[0][0], "answer": turns[0][1]})
    (a.out / "questions.json").write_text(json.dumps(questions, indent=1) + "\n")
    (a.out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name in ("library_train", "library_val", "chat_train", "chat_val"):
        print(f"{name}: {facts[name]['documents']} documents, {facts[name]['tokens']} tokens")


if __name__ == "__main__":
    main()
