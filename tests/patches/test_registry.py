"""apply_patches and remove_patches: idempotent, reversible, and only on upstream code they know."""

import importlib
import subprocess
import sys
import threading
import types
import warnings

import pytest

import mlx_paged
from mlx_paged import KernelUnavailableError, PagedConfig, PatchError
from mlx_paged.patches import registry
from scripts import fingerprints
from tests.support.models.builders import build

MODULES = ("generate", "chat", "cache_prompt", "evaluate", "models.cache")


def upstream_symbols() -> dict[str, object]:
    """Every function and class attribute of the mlx-lm modules the patches touch or rebind names in."""
    found: dict[str, object] = {}
    for name in (*MODULES, "models.llama", "models.qwen3", "models.gemma3_text"):
        try:
            module = importlib.import_module(f"mlx_lm.{name}")
        except ImportError:  # evaluate needs lm_eval
            continue
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.startswith("mlx_lm"):
                found.update({f"{name}.{key}.{k}": v for k, v in vars(value).items() if callable(v)})
    return found


def test_every_symbol_is_the_original_object_after_removal() -> None:
    before = upstream_symbols()
    report = mlx_paged.apply_patches()
    changed = {name for name, value in upstream_symbols().items() if before[name] is not value}
    assert {
        "models.cache.make_prompt_cache",
        "generate.make_prompt_cache",
        "models.llama.Attention.__call__",
    } <= changed
    assert len(report.applied) + len(report.waiting) == len(registry._patches_here()) and not report.skipped
    symbols = upstream_symbols()
    assert mlx_paged.apply_patches().applied == report.applied, "applied twice"
    assert all(symbols[name] is value for name, value in upstream_symbols().items())
    for _ in range(2):
        mlx_paged.remove_patches()
        after = upstream_symbols()
        assert before.keys() == after.keys() and not mlx_paged.is_applied()
        assert [name for name in before if before[name] is not after[name]] == []


def test_script_that_imported_the_name_before_is_patched_too() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    script = types.ModuleType("a_users_script")
    script.make_prompt_cache = make_prompt_cache
    sys.modules["a_users_script"] = script
    try:
        mlx_paged.apply_patches()
        assert isinstance(script.make_prompt_cache(build("llama"))[0], mlx_paged.PagedKVCache)
        mlx_paged.remove_patches()
        assert script.make_prompt_cache is make_prompt_cache
    finally:
        del sys.modules["a_users_script"]


def test_changed_upstream_source_is_skipped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import cache as upstream_cache
    from mlx_lm.models import qwen3

    def __call__(self, x, mask=None, cache=None):
        return x

    monkeypatch.setattr(qwen3.Attention, "__call__", __call__)
    with pytest.raises(PatchError, match="qwen3"):
        mlx_paged.apply_patches(strict=True)
    assert not mlx_paged.is_applied()
    with pytest.warns(UserWarning, match=r"qwen3.Attention.__call__ is not patched"):
        report = mlx_paged.apply_patches()
    assert list(report.skipped) == ["mlx_lm.models.qwen3.Attention.__call__"]
    assert qwen3.Attention.__call__ is __call__
    with pytest.warns(mlx_paged.NotPagedWarning, match="no attention layer writes to"):
        cache = upstream_cache.make_prompt_cache(build("qwen3"))
    assert type(cache[0]).__name__ == "KVCache"


def test_a_changed_model_is_warned_of_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import cache as upstream_cache
    from mlx_lm.models import qwen3

    llama, model = build("llama"), build("qwen3")
    monkeypatch.setattr(qwen3.Attention, "__call__", lambda self, x, mask=None, cache=None: x)
    monkeypatch.delitem(sys.modules, "mlx_lm.models.qwen3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = mlx_paged.apply_patches()
        upstream_cache.make_prompt_cache(llama)
    assert "mlx_lm.models.qwen3.Attention.__call__" in report.waiting and not report.skipped
    monkeypatch.setitem(sys.modules, "mlx_lm.models.qwen3", qwen3)
    with pytest.warns(UserWarning) as caught:
        upstream_cache.make_prompt_cache(model)
    told = [str(warning.message) for warning in caught if "is not patched" in str(warning.message)]
    assert len(told) == 1 and "mlx_lm.models.qwen3.Attention.__call__" in told[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        upstream_cache.make_prompt_cache(llama)
    with pytest.warns(UserWarning, match="qwen3"):
        assert "mlx_lm.models.qwen3.Attention.__call__" in mlx_paged.apply_patches().skipped


def test_apply_patches_imports_no_model_and_no_server_module() -> None:
    program = (
        "import sys, mlx_paged; report = mlx_paged.apply_patches(); "
        "loaded = {name for name in sys.modules if name.startswith('mlx_lm.models.')}; "
        "from mlx_lm.models import cache, llama; "
        "options = dict(model_type='llama', hidden_size=32, num_hidden_layers=1, intermediate_size=32); "
        "args = llama.ModelArgs(**options, num_attention_heads=2, rms_norm_eps=1e-5, vocab_size=9); "
        "caches = cache.make_prompt_cache(llama.Model(args)); "
        "print(sorted(loaded), type(caches[0]).__name__, llama.Attention.__call__.__module__, len(report.waiting) > 20)"
        "; import mlx_paged.server; served = ('mlx_paged.server.', 'starlette', 'uvicorn', 'pydantic'); "
        "print([name for name in sys.modules if name.startswith(served)])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    parts = [f"mlx_lm.models.{name}" for name in ("base", "cache")]  # shared by models
    expected = f"{parts} PagedLayerCache mlx_paged.patches.models.attention True"
    assert ended.stdout.splitlines() == [expected, "[]"], ended.stdout + ended.stderr


def test_kernel_on_is_refused_without_a_gpu_and_nothing_is_patched() -> None:
    with pytest.raises(KernelUnavailableError, match="kernel=on"):
        mlx_paged.apply_patches(PagedConfig(kernel="on"))
    assert not mlx_paged.is_applied()


def test_patching_from_many_threads_is_safe() -> None:
    before = upstream_symbols()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                mlx_paged.apply_patches()
                mlx_paged.remove_patches()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    mlx_paged.remove_patches()
    assert all(before[name] is value for name, value in upstream_symbols().items())


def test_fingerprints_of_all_replaced_symbols_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fingerprints.main([])
    assert ended.value.code == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert {name: value for name, value, _ in lines} == fingerprints.known_fingerprints()
    assert {verdict for *_, verdict in lines} == {"known"}
