"""The tokenizer of a tiny checkpoint: byte-level BPE with DeepSeek's special tokens, trained on the spot.

Owns the training text and the spelling of special tokens (spec §10.1). Any text can be encoded, encoding adds
nothing, and the same size always gives the same file. Knows nothing of weights.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deskfleet.errors import ConfigError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
IMAGE = "<｜deepseek_image｜>"

BASE_TOKENS = (BOS, EOS, PAD)
"""Ids 0, 1 and 2, as published."""

ADDED_TOKENS = (
    SYSTEM,
    USER,
    ASSISTANT,
    "<|EOT|>",
    THINK,
    END_THINK,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE,
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
    # The image token of the V4 series, and still the default of deepseek-recipe. V4.1 has it under another id
    # than its own image token; so does this tokenizer, so that whoever mixes them up is found out.
    "<｜image｜>",
)
"""Appended after the trained vocabulary, in the published order of ids."""

_SPECIAL = frozenset((*BASE_TOKENS, *ADDED_TOKENS[ADDED_TOKENS.index(IMAGE) + 1 :]))

_NUM_BYTES = 256

CORPUS = (
    "The harbour wakes before the town does, and the first boats leave while the lamps are still lit.",
    "A small machine on a desk can answer questions all day if nobody asks it to do too much at once.",
    "She counted the steps from the gate to the kitchen door: forty-two in summer, forty in winter.",
    "When the wind turns north, the old windmill complains and the children pretend it is speaking.",
    "Nobody remembers who planted the pear trees, but everyone knows which one gives the sweetest fruit.",
    "The library keeps its maps in long flat drawers, and the oldest of them shows a river that moved.",
    "If the first answer looks wrong, ask again in other words, and compare the two answers line by line.",
    "He wrote the letter three times; the third version was short, honest and a little too late.",
    "Rain on a tin roof is a kind of music that needs no audience and takes no requests.",
    "Before the market opens, the baker sets out twelve loaves, nine rolls and one cake for the teacher.",
    "The clock in the station is always four minutes fast, which is why this town never misses a train.",
    "They followed the stream uphill until it became a trickle, then a wet stone, then nothing at all.",
    "Tell me what you know, what you only guess, and how you would find out the difference.",
    "A good tool does one thing, says what it did, and stops when something is not as it should be.",
    "The blue bicycle belongs to the doctor, the red one to her brother, and the green one to nobody.",
    "Every evening the keeper of the lighthouse writes down the weather, the ships and one good joke.",
    "What is the capital of the country with the longest coast, and how many islands lie in front of it?",
    "Please explain how a bridge carries its own weight before it carries anything else.",
    "I would like a table for five people at seven, by the window if that is possible.",
    "Thank you for the quick reply; the parts arrived yesterday and they fit without any trouble.",
    "Could you summarise the report in two sentences and list the open questions below it?",
    "First heat the oil, then add the onions, then wait; most recipes fail because somebody did not wait.",
    "The answer depends on the question, and the question depends on who is asking and why.",
    "Let us think about this step by step: first the simple case, then the general one, then the limits.",
    "Yes, that is correct. No, that is not what I meant. Perhaps there is a third way to look at it.",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen.",
    "On Monday it rained, on Tuesday it snowed, on Wednesday the sun came out and stayed until Saturday.",
    "In 1987 the valley had 312 houses; by 2004 there were 1,950, and in 2021 only 1,204 had people in them.",
    "12 + 7 = 19, 19 - 4 = 15, 15 * 3 = 45, 45 / 9 = 5, and 5 is a prime number.",
    "Version 2.10.3 needs 64 GiB of memory, 8 cores, and about 0.25 s for 1,000 rows on port 8080.",
    "0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100 128 256 512 1024 4096 65536",
    'def total(prices, rate=0.2):\n    """Return the sum with tax."""\n    return sum(prices) * (1 + rate)\n',
    "for index, name in enumerate(names):\n    if name is None:\n        continue\n    print(index, name)\n",
    "class Queue:\n    def __init__(self, size):\n        self.items = []\n        self.size = size\n",
    "import json\nwith open(path, encoding='utf-8') as file:\n    data = json.load(file)\n",
    "while left < right:\n    middle = (left + right) // 2\n    if values[middle] < target: left += 1\n",
    "int main(void) {\n    int count = 0;\n    while (count < 10) { count++; }\n    return 0;\n}\n",
    "SELECT name, price FROM items WHERE price > 10 AND stock > 0 ORDER BY price DESC LIMIT 20;",
    "$ ls -la /var/log && tail -n 50 server.log | grep 'error' > errors.txt",
    '{"name": "get_weather", "description": "Return the weather", "parameters": {"type": "object"}}',
    '{"city": "Lisbon", "temperature": 21.5, "unit": "celsius", "rain": false, "wind": [3, 5, 4]}',
    '{"status": "ok", "id": 42, "items": [{"key": "a", "value": 1}, {"key": "b", "value": null}]}',
    '{"type": "function", "required": ["city"], "properties": {"city": {"type": "string"}}, "strict": true}',
    "# Notes\n\n- buy paper, ink and string\n- call about the lamp\n- read chapter 3\n\nDone: 2.\n",
    "Dear Sir or Madam,\n\nplease find the invoice attached.\n\nKind regards,\nthe office\n",
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n",
    "You are a helpful assistant. Answer in one short sentence, and say so when you are not sure.",
    "## Tools\n\nYou have access to the tools below. Parameters are given by name, strings as they are.",
    "The user asked for a colour. The picture shows a red square on white, so the colour is red.",
    "Hello! How are you today? I am fine, thanks. What can I do for you?",
    "An error occurred: the file was not found. Check the path and try again.",
    "Café, naïve, façade, Zürich, São Paulo, smörgåsbord: words that travelled and kept their accents.",
)
"""Sentences written for this purpose: prose, numbers, code, JSON and the phrases that prompts are made of."""


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a tokenizer of exactly `vocab_size` ids: begin, end, pad, 256 bytes, merges, added tokens.

    Raises ConfigError when the size leaves no room for the bytes, or asks for more merges than the text has.
    """
    num_fixed = len(BASE_TOKENS) + _NUM_BYTES + len(ADDED_TOKENS)
    if vocab_size < num_fixed:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: bytes and special tokens alone are {num_fixed} ids",
            hint=f"use {num_fixed} or more",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in BASE_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=text in _SPECIAL, normalized=False) for text in ADDED_TOKENS]
    )
    reached = tokenizer.get_vocab_size(with_added_tokens=True)
    if reached != vocab_size:
        raise ConfigError(
            f"vocab_size {vocab_size} is too large: the training text yields {reached} ids",
            hint=f"use {reached} or less",
        )
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a token spelled `text`. Raises ConfigError when there is none."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise ConfigError(f"the tokenizer has no token {text!r}")
    return found


def text_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that are printable text: no special tokens, no parts of a character."""
    first, end = len(BASE_TOKENS), tokenizer.get_vocab_size(with_added_tokens=True) - len(ADDED_TOKENS)
    texts = tokenizer.decode_batch([[token_id] for token_id in range(first, end)])
    return [token_id for token_id, text in enumerate(texts, start=first) if _is_text(text)]


def _is_text(text: str) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in text and text.replace("\n", " ").isprintable()


__all__ = [
    "ADDED_TOKENS",
    "BASE_TOKENS",
    "BOS",
    "CORPUS",
    "END_THINK",
    "EOS",
    "IMAGE",
    "PAD",
    "SYSTEM",
    "THINK",
    "build_tokenizer",
    "text_token_ids",
    "token_id",
]
