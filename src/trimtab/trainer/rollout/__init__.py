"""The data side of training: from prompts to scored groups, synchronous or asynchronous.

source              `RolloutSource`, the interface of the training loop, and the synchronous source
async_source        the asynchronous source, with `engine_thread`
collector           scores the responses to a request
responses           how responses are sampled; other ways in `prefixes`, `demonstrations`
prompts             the order of prompts, and their lengths
schedule, buffer    when groups are generated and trained; scored groups that wait for a batch
canary              gives an engine new weights, and checks that it samples from them
"""
