# SPDX-License-Identifier: Apache-2.0
"""Read training tokens: files, sample order, blends, batches, loaders, tokenizers."""
