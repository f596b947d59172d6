# SPDX-License-Identifier: Apache-2.0
"""Read training tokens.

build        the loaders of a run: begin here
indexed      tokens on disk, Megatron's .bin and .idx; watched, cache: how they are read
gpt          samples of a corpus, in an order of data and seed; sample_index, split, mock
blend        several corpora, by weight
megatron_order  the order of Megatron's data sets and blends; one_pass: each token once
loader       global batches, cut for each data-parallel rank; workers, batch, context_part
tokenizer    text to ids and back; hf_tokenizer, tik_tokenizer, gpt2_tokenizer; tokenizer_files
hf_classes   what transformers makes of a tokenizer.json; auto_tokenizer: what it reads of ours
token_texts  which bytes each id stands for; bytes_per_token counts them for bits per byte
text_files   the files of text for preprocessing; shards, parquet, bad_documents
made_with    PREFIX.json: which tokenizer made a pair; loss_mask: which of its tokens count
not_tokens   what a --data-path names where it names no pair
identity     whether two corpora are the same; same_data: which of a run's are
"""
