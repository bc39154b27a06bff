"""Counts of instructions: of listed machine code, and of kernels if nvcc and nvdisasm are installed."""

from __future__ import annotations

import pytest

from mlx_paged.kernels.launch_shape import LEAST_MATRIX_GQA, LEAST_MATRIX_GQA_OF_PAGES
from tests.support.msl.instructions import Loop, counted, per_token, token_loop, tools, variants

LOOP = ["LDG.E R1, [R2.64]", "MUFU.EX2 R3, R1", "@P0 FFMA R4, R3, R1, R4", "MOV R5, RZ", "@!P1 BRA `(.L_x_1)"]


def test_token_loop_is_the_shortest_loop_that_does_everything() -> None:
    scan = [".L_x_0:", "LDG.E R1, [R2.64]", "@P0 BRA `(.L_x_0)"]
    aside = ["FADD R1, R1, R1", "BRA `(.L_x_1)", "BRA `(.L_x_2)"]  # out of line, and back
    code = [*scan, ".L_x_1:", *LOOP, *aside, ".L_x_2:", "EXIT"]
    assert token_loop(code) == [".L_x_1:", *LOOP]
    with pytest.raises(ValueError, match="min"):
        token_loop(scan)


def test_moves_do_not_count_and_a_matrix_product_counts_16() -> None:
    assert counted([".L_x_1:", *LOOP, "IMAD.MOV.U32 R1, RZ, RZ, R2", "CS2R R2, SRZ", "NOP"]) == Loop(4, 0)
    found = counted(["HMMA.1688.F32.BF16 R8, R8, R9, RZ", "IMAD.WIDE R1, R2, R3, R4"])
    assert found == Loop(2, 1) and found.issued == 17


@pytest.mark.slow
@pytest.mark.skipif(not tools(), reason="nvcc and nvdisasm are not here")
@pytest.mark.parametrize(
    ("bits", "gqa", "fewer"),
    [
        *((bits, 4, False) for bits in (0, 8, 4)),
        *((0, gqa, True) for gqa in (LEAST_MATRIX_GQA, 16)),
        *((bits, LEAST_MATRIX_GQA_OF_PAGES, True) for bits in (8, 4)),
    ],
)
def test_matrix_kernel_is_chosen_where_it_takes_fewer_instructions(bits: int, gqa: int, fewer: bool) -> None:
    lanes, matrices = variants(gqa, bits)
    assert (per_token(matrices) < per_token(lanes)) is fewer
