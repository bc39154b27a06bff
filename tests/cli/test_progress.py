"""The progress bar of a batch run."""

import io

from mlx_paged.cli.prompts_file import Counts
from mlx_paged.cli.terminal import BatchProgress


def test_progress_bar_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = BatchProgress(stream)
        progress.show(Counts(3, 12, 1), 500, 2.0, None)
        progress.show(Counts(4, 12, 1), 510, 2.01, None)  # too soon
        progress.show(Counts(0, 12, 0), 0, 3.0, None, num_prompt_tokens=2048, underway=4.0)
        progress.clear()
    assert "3/12 prompts, 1 failed, 250 tokens/s" in terminal.getvalue()
    assert "4/12" not in terminal.getvalue()
    assert f"[{10 * '#'}{20 * '.'}] 0/12 prompts, 2,048 prompt tokens" in terminal.getvalue(), "before anything is done"
    assert plain.getvalue() == ""
