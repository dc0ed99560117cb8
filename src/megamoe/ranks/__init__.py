"""What :class:`~megamoe.distributed.SymmetricMoE` is made of.

How ranks meet (meeting, topology) and get memory that all can address (memory), compile one at a
time (compile_lock), put a call's inputs into the buffer (staging), launch (lane), and look to torch
like one operator (ops).
"""
