# SPDX-License-Identifier: Apache-2.0
"""Read training tokens.

build        the loaders of a run: begin here
indexed      tokens on disk, Megatron's .bin and .idx; watched, cache: how they are read
gpt          samples of a corpus, in an order of data and seed; sample_index, split, mock
blend        several corpora, by weight
megatron_order  the order of Megatron's data sets and blends; one_pass: each token once
loader       global batches, cut for each data-parallel rank; workers, batch, context_part
tokenizer    text to ids and back; hf_tokenizer, tik_tokenizer, gpt2_tokenizer; tokenizer_files
auto_tokenizer  the files for transformers.AutoTokenizer of a SentencePiece model
token_texts  the bytes of text of each id; bytes_per_token counts them for bits per byte
text_files   the files of text for preprocessing; shards, parquet, bad_documents
made_with    PREFIX.json: the tokenizer that made a pair; loss_mask: the tokens that count
not_tokens   advice on a --data-path that is not a pair
identity     the digest of a corpus; same_data: data that a run would read twice
"""
