"""What SGLang's NGRAM worker imports; NGRAM itself is not served by the rig."""


def reconstruct_indices_from_tree_mask(*args: object) -> None:
    raise NotImplementedError("sgl_kernel.speculative is not in the test rig")
