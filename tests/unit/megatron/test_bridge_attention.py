"""Attention with a learned term in its softmax, on a GPU: refused with a cuDNN that has no fused kernel for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nemo_oprd.megatron.megatron_bridge import build


@pytest.mark.parametrize("version", [(9, 13, 0), (9, 17, 1), (8, 20, 0)])
def test_an_older_cudnn_is_refused(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]) -> None:
    utils = SimpleNamespace(get_cudnn_version=lambda: version)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.utils", utils)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    with pytest.raises(ValueError, match=f"cuDNN {'.'.join(map(str, version))}, .*; expected cuDNN 9.18.0 or later: "):
        build._check_fused_attention()
    utils.get_cudnn_version = lambda: (9, 18, 0)
    build._check_fused_attention()
