"""`megamoe trace`: recorded events and figures of them (events), a picture (plot), and calls that
record: on one GPU or the interpreter (trial), and on several GPUs (gpus).
"""
