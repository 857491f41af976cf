"""Exact sampling: the token of a row depends on its logits and its own request, on nothing else.

| module | holds |
|---|---|
| ``seeded`` | noise fixed by (request seed, position): the draw of a token |
| ``filtering`` | top_k, top_p and min_p, ranked |
| ``sampler`` | ``RowSampler``: SGLang's sampler, one rule per kind of row |
| ``penalties`` | penalties and min_new_tokens of a row, counted over its own prefix |
| ``grammar`` | grammar masks along a drafted chain |
| ``processors`` | custom logit processors, once per committed position |
| ``logprobs`` | output logprobs in the layout of SGLang's result path |
| ``settle`` | rows of one forward pass -> committed tokens |
| ``requests`` | seeds, and what a request may ask for |
"""
