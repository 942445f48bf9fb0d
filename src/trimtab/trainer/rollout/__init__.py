"""The data side of training: from prompts to scored groups, synchronous or asynchronous.

source              `RolloutSource`, what the training loop sees, and the synchronous one
async_source        the asynchronous one, with `engine_thread`
collector           scores the responses to a request
responses           ways to get responses; others in `prefixes`, `demonstrations`
prompts             the order of prompts, and their lengths
schedule, buffer    which groups are generated and trained when; those that wait
canary              gives an engine new weights, and checks that it samples from them
"""
