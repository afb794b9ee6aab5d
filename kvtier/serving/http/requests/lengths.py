"""Texts that cannot fit into the context are refused before all of them is tokenised.

No number of characters shows that by itself: a token may stand for a long run of spaces, or for a word that is not
known, and a tokenizer may drop characters. So a long text is tokenised in pieces first, until they are too many tokens.
"""

from __future__ import annotations

from typing import Any

from kvtier.serving.http.requests.keys import Visit
from kvtier.serving.http.requests.refusals import Refusal, too_long

#: Characters for each token of the context, up to which a text is tokenised at once: a language has fewer of them.
_AT_ONCE = 8
#: Characters of a piece; and how many times the context pieces may have: the whole has fewer tokens than they.
_PIECE, _MARGIN = 1 << 16, 2


def check_fits(text: str, tokenizer: Any, context: int | None, visit: Visit) -> None:
    """Refuse a text that cannot fit, in the time that one takes which does.

    Args:
        tokenizer: of Transformers.
        context: tokens; None: no limit is known.
        visit: of the client that waits.

    Raises:
        Refusal: it is too long, or the client has left.
    """
    if context is None or may_fit(len(text), context):
        return
    count = 0
    for start in range(0, len(text), _PIECE):
        if visit.left:
            raise Refusal(499, "The client has left.", code="client_left")
        count += len(tokenizer(text[start : start + _PIECE], add_special_tokens=False)["input_ids"])
        if count > _MARGIN * context:
            raise too_long(context, f"more than {context}")


def may_fit(characters: int, context: int | None) -> bool:
    """Whether a text of so many characters may be tokenised without a look at its pieces."""
    return context is None or characters <= _AT_ONCE * context
