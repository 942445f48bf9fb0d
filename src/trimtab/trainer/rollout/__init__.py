"""The data side of training: from prompts to scored groups, synchronous or asynchronous.

source              `RolloutSource`, the interface of the training loop, the synchronous source, and `publish`
async_source        the asynchronous source, with a thread for each engine
collector           scores the responses to a request
responses           how responses are sampled; other ways in `prefixes`, `demonstrations`
prompts             the order of prompts, and their lengths
schedule, buffer    when groups are generated and trained; scored groups that wait for a batch
canary              checks that an engine samples from its new weights
rollout_stats       counts, durations and messages of all of them
"""
