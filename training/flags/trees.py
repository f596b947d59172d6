# SPDX-License-Identifier: Apache-2.0
"""Read trees.txt: other names for flags, and the flags of trees derived from Megatron-LM."""

from training.flags.megatron import cells, sections_of

_TABLE = sections_of("trees.txt")
SYNONYMS = {
    name: words.split()
    for names, words in map(cells, _TABLE.pop("synonyms"))
    for name in names.split()
}  # {flag: the words of this program}
VALUES = {
    (flag, value.lower()): here
    for flag, values, here in map(cells, _TABLE.pop("values"))
    for value in values.split(",")
}  # {(flag, value): the value of this program, or the words for both}
TREES = {
    tree: {word.removesuffix(":0"): not word.endswith(":0") for word in " ".join(lines).split()}
    for tree, lines in _TABLE.items()
}  # {tree: {flag: whether it has values}}
