"""A byte-level BPE tokenizer with a chat template, made from texts."""

from collections.abc import Iterable
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # padding, start and end of a message: ids 0, 1, 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train(texts: Iterable[str], *, vocab_size: int) -> Any:
    """A `transformers` tokenizer with ChatML turns, digits split singly. Any text survives encoding and decoding.

    The vocabulary holds the special tokens, the 256 bytes, and merges up to `vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
