"""The policy's tokenizer: whole words, one- and two-digit numbers and set phrases as single tokens, bytes for the rest.

The vocabulary is listed here, not learned. The model is byte-level: it takes a piece whole if the vocabulary has it, and its
bytes otherwise, so any text can be encoded, and decoding returns it exactly.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from trainer.demo import family, lessons
from trainer.demo.family import OPERATORS
from trainer.demo.lessons import CHAT_TEMPLATE, END, PAD, ROLE_TOKENS

CONTEXT_TOKENS = 2048
VOCABULARY_MULTIPLE = 64
SPECIALS = (PAD, END, *ROLE_TOKENS)
_PIECES = r"[A-Za-z]+|\d{1,2}|\n| +|[^A-Za-z\d\s]|\s"
_CODE_WORDS = (
    "for", "in", "if", "range", "min", "max", "math", "os", "sys", "True", "False", "None", "Traceback",
    "NameError", "IndentationError", "SyntaxError", "TypeError", "IndexError", "ValueError",
    "AttributeError", "ModuleNotFoundError", "line", "name", "is", "not", "defined", "expected", "an",
    "indented", "block", "after", "function", "definition", "statement", "on", "larger", "smaller",
    "first", "last",
)  # fmt: skip
PHRASES = (
    "You mend small Python repositories.\n"
    "Every turn: one THOUGHT line, then one bash block.\nTo finish, run: ",
    "FORMAT ERROR. Every turn: one THOUGHT line, then one bash block.", "ISSUE: ", " is wrong: ",
    " should be ", ", not ", ". ", "it should ", "it should subtract the other way round",
    "it should take the ", " one", "it uses ", " where ", " is right", "it should start counting at 0",
    "it leaves out the last step", "it should look at the ", " item", "the limit itself should pass",
    "it makes no use of ", "THOUGHT: ", "\n```bash\n", "\n```", lessons.SUBMIT,
    "<returncode>0</returncode>\n<output>\n", "<returncode>1</returncode>\n<output>\n",
    "<returncode>2</returncode>\n<output>\n", "</output>", "find it.", "read it.",
    "change line ", "test it.", "not right, start over.", "done.",
    "grep -rn 'def ", "(' .", "cat -n ", "git checkout -q . && ", "sed -i '", "s|.*|", "|' ",
    'python3 -c "from ', " import ", "; print(", ')" 2>&1 | tail -n 1', "    return ", "        return ",
    "    for ", "    if ", " in range(", "        ", "    ", "     ", " in ", " = ", " += ", " + ", " - ",
    " * ", " == ", " < ", " <= ", " > ", " >= ", ", ", "):", ".py", "./", "def ", "# small sums", "# kept simple",
    "import ",
)  # fmt: skip


def build_tokenizer() -> Tokenizer:
    """The tokenizer; its ids are the same on every machine."""
    pieces = list(SPECIALS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    listed = [
        *family.VERBS,
        *family.NOUNS,
        *family.LOCALS,
        *family.DIRECTORIES,
    ]
    listed += [*OPERATORS.values(), *_CODE_WORDS, *map(str, range(10, 100))]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces + listed))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in SPECIALS]
    )
    tokenizer.add_tokens(
        [AddedToken(phrase, normalized=False) for phrase in PHRASES if phrase not in vocabulary]
    )
    return tokenizer


def padded_vocabulary_size(tokenizer: Tokenizer) -> int:
    """The number of rows of the embedding: the vocabulary's size, rounded up."""
    return -(-tokenizer.get_vocab_size() // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as the Hugging Face loaders expect them."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
