"""Tokenizers, windows and logits for the tests of question answering."""

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_coefsfl.tasks.spans import answers_from_logits, encode_questions

SPECIAL = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3}
TEMPLATES = {  # pair template, special tokens, side of the padding, token types
    "bert": ("[CLS] $A [SEP] $B:1 [SEP]:1", 3, "right", True),
    "roberta": ("[CLS] $A [SEP] [SEP] $B [SEP]", 4, "right", False),
    "xlnet": ("$A [SEP] $B:1 [SEP]:1 [CLS]:2", 3, "left", True),
    "gpt": (None, 0, "left", False),
}
CONTEXT = "one two three four five six seven eight"


def make_tokenizer(kind):
    """Return a tokenizer of words and punctuation, with special tokens placed as that kind of model does."""
    template, _, side, types = TEMPLATES[kind]
    tokenizer = Tokenizer(models.WordLevel(SPECIAL, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        known = [(name, SPECIAL[name]) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(pair=template, special_tokens=known)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if template is not None else {}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        padding_side=side,
        model_input_names=inputs,
        **names,
    )


def row(answer=None, question="which ?", context=CONTEXT, name="q"):
    texts = [] if answer is None else [answer]
    answers = {"text": texts, "answer_start": [context.index(text) for text in texts]}
    return {"id": name, "question": question, "context": context, "answers": answers}


def encode(rows, tokenizer, max_length=384, stride=128):
    columns = {name: [one[name] for one in rows] for name in rows[0]}
    encoded = encode_questions(columns, tokenizer, max_length, stride)
    assert len({len(values) for values in encoded.values()}) == 1
    return [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]


def text_at(window, context, first, last):
    return context[window["offset_mapping"][first][0] : window["offset_mapping"][last][1]]


def answer_of(window, context):
    return text_at(window, context, window["start_positions"], window["end_positions"])


def peaked(windows, length, at=("start_positions", "end_positions")):
    """Return logits that are 10 at the positions and 0 elsewhere."""
    logits = np.zeros((2, len(windows), length), dtype=np.float32)
    for side, name in enumerate(at):
        for number, window in enumerate(windows):
            logits[side, number, window[name]] = 10
    return logits


def answers_of(examples, windows, logits, **kwargs):
    return answers_from_logits(examples, windows, *logits, **kwargs)
