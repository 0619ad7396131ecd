"""The step on an NVIDIA GPU: kernels, their packed weights, and how they are checked and timed.

Nothing here is imported unless a GPU is asked for: the kernels need Triton, which only CUDA builds of torch bring.
Every kernel states the operator of `engine/ops` that it computes; that reference is what its test compares it with, in
Triton's interpreter or the emulator (no GPU) and on the device alike. Kernels read and write static buffers and never
tell the host anything, so that one step of any number of layers can be captured as a graph (docs/decisions/0021).

    packing      weights from the checkpoint's order to the order in which a kernel streams them
    tiles        device functions: decoding, scales, and the two accumulation loops
    experts      routed and shared experts
    linear       FP8 and bf16 projections
    hyper        residual streams: expand, mix, collapse, norm and activation quantisation
    routing      router scores to experts and a work list
    native       what these and others do in CUDA C++ for up to 64 rows (docs/decisions/0024)
    prefill      steps of chunks of prompts, with kernels of their own; prefill_replay, the decoder for their last rows
    draft        draft stages: their context, blocks of drafts, and the chain of tokens
    sums         what a rank has of a sum over ranks, in one buffer
    collectives  how the devices of several ranks exchange, and which each has
    synthetic    random weights of the published size, made on the device
    bench        checks and times of all of it
"""
