"""A tokenizer of whole words."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far"]
# Users say `<s> ...`, the assistant `a ...`, both up to `</s>`.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' if m.role == 'user' else 'a ' }}{{ m.content + ' </s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)


def words_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", bos_token="<s>", eos_token="</s>",
        model_max_length=32,
    )  # fmt: skip
