# SPDX-License-Identifier: Apache-2.0
"""Sizes of models, memory and links of GPUs: what tables of published runs call by a name alone."""

PLAYBOOK = {  # layers, hidden, heads, ffn: confirmed by the table's own FLOPs to 1 %
    "1B": (16, 2048, 32, 8192), "3B": (28, 3072, 32, 8192),
    "8B": (32, 4096, 32, 14336), "80B": (80, 8192, 64, 28672),
}  # fmt: skip
LLAMA = {  # other sizes by name: the Llama papers
    "7B": (32, 4096, 32, 11008), "13B": (40, 5120, 40, 13824), "33B": (60, 6656, 52, 17920),
    "65B": (80, 8192, 64, 22016), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248),
}  # fmt: skip
PLAYBOOK_UNTIED = 10_000  # an MLP from which nanotron's scaling script unties the output layer
PLAYBOOK_NODE, PLAYBOOK_VOCABULARY, PLAYBOOK_SEQUENCE = 8, 131072, 4096
GPT_VOCABULARY = 50304  # GPT-2's 50,257, padded: vTrain's, and where a table names none
GIB = 2.0**30
MOST = 1 << 30  # of a count
DEEPEST = 4096  # stages of a pipeline
NAMED = {  # layers, hidden, heads, kv heads, ffn, vocabulary: where a row names a model alone
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256), "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": (126, 16384, 128, 8, 53248, 128256),
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000), "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 51200),
}  # fmt: skip
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-2p"}
NETWORK = {"h100": 400.0, "h200": 400.0, "a100": 200.0, "b200": 400.0}  # Gb/s a GPU, unless said
DEVICES = {  # what a row calls a GPU: the device file, GPUs that NVLink joins, GB of memory
    "gb300": ("b200", 72, 288.0), "gb200": ("b200", 72, 186.0), "b300": ("b200", 8, 288.0),
    "b200": ("b200", 8, 180.0), "gh200": ("h200", 1, 96.0), "h200": ("h200", 8, 141.0),
    "h100": ("h100", 8, 80.0), "h800": ("h100", 8, 80.0), "a100": ("a100", 8, 80.0),
    "a800": ("a100", 8, 80.0),
}  # fmt: skip
