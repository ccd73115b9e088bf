"""The built-in fusion families: modules that compute the same from weights in another layout.

    fused_class            subclasses made at run time that can be pickled
    joined_linear          several `Linear`s of one input as one; `qkv` and `gate_up` are made of it
    patch_projection       convolutions over patches that do not overlap as a `Linear`: `patch_embeddings`, `..._2d`
    conv_bn                batch normalisation folded into the convolution before it

The forward of the original class runs unchanged: where it calls a module that is fused away, there is a stand-in
without weights of its own, which computes from the fused ones. So it works for any class, and its state dict holds only
what is fused. `loadplan.runtime.fusion` finds the families by name; each module's `FAMILY` is one.
"""
