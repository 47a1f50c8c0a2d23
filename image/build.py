"""The build: recipe and guest in, image out, step by step, with every step's result kept for the next time.

    recipe ─ packages ─┬─ base tar ── compilers ── guest's layer ─┐
    guest/ ────────────│──────────────────────────┘               ├─ rootfs ─┐
                       └─ tools tar ─┬─ mke2fs ───────────────────┘          ├─ manifest
                                     └─ kernel, initrd, QEMU's closure ──────┘

It must not start guests. The service reads the result through `manifest` only.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from image.closure import build_closure, closure_digest
from image.debian import Tree, install_tree, plan_sources, read_targets, scratch_folder
from image.digest import DigestCache, canonical_json, digest_bytes, digest_file, digest_of
from image.errors import ImageError
from image.initrd import build_initrd
from image.layer import HOME, build_layer, guest_sources
from image.manifest import Manifest, Part, load_manifest
from image.publish import publish_manifest, publish_part
from image.recipe import Recipe, load_recipe
from image.rootfs import make_ext4, merge
from image.stages import Stages, key_of_tree
from image.tree import LIBRARIES, run, unpack

HERE: Final = Path(__file__).resolve().parent
GUEST: Final = HERE.parent / "guest"
RECIPE: Final = HERE / "recipe.toml"

TOOLS: Final = (
    "busybox-static",
    "e2fsprogs",
    "libarchive13t64",
    "linux-image-cloud-amd64",
    "qemu-system-x86",
)
"""What an image is made with and runs on, from the guest's own suite; never installed, only unpacked."""

_TOOLS_TAKEN: Final = (
    LIBRARIES,
    "boot/vmlinuz-*",
    "etc/mke2fs.conf",
    "usr/bin/busybox",
    "usr/bin/qemu-system-x86_64",
    "usr/lib/modules",
    "usr/sbin/mke2fs",
    "usr/share/qemu",
    "usr/share/seabios",
)
_COMPILERS_TAKEN: Final = (
    "bin",
    "lib",
    "lib64",
    "usr/bin",
    "usr/include",
    "usr/lib",
    "usr/lib64",
    "usr/libexec",
)
_COMPILERS_LEFT: Final = (
    "usr/lib/git-core",
    "usr/lib/node_modules",
    "usr/bin/node",
    "usr/bin/nodejs",
    f"{HOME}/*",
)


def build_image(
    output: Path,
    recipe: Path = RECIPE,
    *,
    progress: Callable[[str], None],
    guest: Path = GUEST,
    cache: Path | None = None,
) -> Manifest:
    """Build the image in `output`, or find that it is already what recipe, guest and this package make.

    Args:
        output: The image's directory.
        recipe: A recipe's file.
        progress: Told the steps, one line each.
        guest: The guest package's directory.
        cache: Where the steps' results are kept, 1.3 GB; `<output>.cache` if not given. Images may share one.

    Returns:
        The manifest that was published, or was there.

    Raises:
        ImageError: Saying what to do. The image that was there before is untouched.
    """
    chosen = load_recipe(recipe)
    sources = guest_sources(guest)
    stages = Stages(cache or output.with_name(output.name + ".cache"))
    with stages.locked():
        digests = DigestCache(stages.directory / "digests.json")
        state = stages.directory / f"built-{digest_of(str(output.absolute()))[:16]}.json"
        inputs = _key_of_inputs(chosen, sources)
        found = _unchanged(output, state, inputs, digests)
        if found is None:
            found = _Build(output, chosen, sources, stages, digests, progress).run()
            state.write_bytes(canonical_json({"inputs": inputs, "digest": found.digest}))
            stages.forget_unused()
        else:
            progress("image: nothing changed")
        digests.save()
        return found


def key_of_base(recipe: Recipe) -> str:
    """Digest of everything that the guest's package tree depends on, package versions aside (see `epoch`)."""
    fields: dict[str, Any] = {
        "suite": recipe.suite,
        "packages": recipe.packages,
        "drop": recipe.drop,
        "keep": recipe.keep,
        "epoch": recipe.epoch,
        "script": digest_bytes(recipe.script),
        "customize": digest_file(HERE / "customize.sh"),
    }
    return digest_of(fields)


def key_of_tools(recipe: Recipe) -> str:
    """Digest of everything that the tools' tree depends on, package versions aside."""
    return digest_of({"suite": recipe.suite, "packages": TOOLS, "epoch": recipe.epoch})


def _key_of_inputs(recipe: Recipe, sources: dict[str, bytes]) -> str:
    ours = sorted(path for path in HERE.iterdir() if path.suffix in {".py", ".sh"})
    return digest_of(
        {
            "base": key_of_base(recipe),
            "tools": key_of_tools(recipe),
            "disk_gib": recipe.disk_gib,
            "guest": {name: digest_bytes(contents) for name, contents in sources.items()},
            "image": {path.name: digest_file(path) for path in ours},
        }
    )


def _unchanged(output: Path, state: Path, inputs: str, digests: DigestCache) -> Manifest | None:
    """The published manifest if it was built from these inputs and every part is still what it says."""
    try:
        built = json.loads(state.read_bytes())
        manifest = load_manifest(output)
        if built != {"inputs": inputs, "digest": manifest.digest}:
            return None
        whole = all(digests.digest(output / part.file) == part.sha256 for part in manifest.parts.values())
        held = all(
            closure_digest(output / vmm.closure, digests.digest) == vmm.digest
            for vmm in manifest.vmm.values()
        )
    except (OSError, ValueError, ImageError):
        return None
    return manifest if whole and held else None


class _Build:
    """One run of the steps; holds what they share."""

    def __init__(
        self,
        output: Path,
        recipe: Recipe,
        sources: dict[str, bytes],
        stages: Stages,
        digests: DigestCache,
        progress: Callable[[str], None],
    ) -> None:
        self._output = output
        self._recipe = recipe
        self._sources = sources
        self._stages = stages
        self._digests = digests
        self._progress = progress

    def run(self) -> Manifest:
        self._output.mkdir(parents=True, exist_ok=True)
        for left in self._output.glob(".new-*"):  # by a build that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        base = self._stages.stage("base", key_of_base(self._recipe), self._make_base) / "tree.tar"
        tools_tar = self._stages.stage("tools", key_of_tools(self._recipe), self._make_tools) / "tree.tar"
        tools = self._unpacked("tools-tree", key_of_tools(self._recipe), tools_tar, _TOOLS_TAKEN, ())
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=self._output))
        try:
            parts = self._make_parts(base, tools, tools_tar, work)
            self._progress("closure: QEMU, its libraries and firmware")
            closure = build_closure(tools, self._output / "closures")
        finally:
            shutil.rmtree(work, ignore_errors=True)
        manifest = Manifest(self._recipe.epoch, self._recipe.disk_gib, parts, {"qemu": closure})
        publish_manifest(self._output, manifest)
        self._progress(f"image: {manifest.digest[:16]} is in {self._output}")
        return manifest

    def _make_base(self, stage: Path) -> None:
        self._progress(f"base: installing {len(self._recipe.packages)} Debian packages and what they need")
        options = tuple(f"path-exclude={path}" for path in self._recipe.drop)
        options += tuple(f"path-include={path}" for path in self._recipe.keep)
        tree = Tree("minbase", self._recipe.packages, options)
        self._install(tree, stage, HERE / "customize.sh", self._recipe.script)

    def _make_tools(self, stage: Path) -> None:
        self._progress("tools: unpacking QEMU, the kernel and mke2fs")
        self._install(Tree("extract", TOOLS), stage, HERE / "tools.sh", b"")

    def _install(self, tree: Tree, stage: Path, hook: Path, script: bytes) -> None:
        """Run mmdebstrap for a stage, its hook copied to where a user namespace can read it."""
        sources = plan_sources(read_targets(), self._recipe.suite, self._recipe.mirror)
        with tempfile.TemporaryDirectory(prefix="microvm-image-", dir=scratch_folder()) as folder:
            os.chmod(folder, 0o755)  # noqa: S103 (mmdebstrap's user namespace reads it as another user)
            copied = Path(folder, "hook")
            copied.write_bytes(hook.read_bytes())
            copied.chmod(0o755)
            environment: dict[str, str] = {}
            if script:
                Path(folder, "script").write_bytes(script)
                environment["MICROVM_IMAGE_SCRIPT"] = str(Path(folder, "script"))
            install_tree(
                tree,
                self._recipe.suite,
                sources,
                self._recipe.epoch,
                stage / "tree.tar",
                progress=self._progress,
                hook=copied,
                environment=environment,
            )
        with (stage / "tree.tar").open("rb") as file:
            os.fsync(file.fileno())

    def _unpacked(
        self, name: str, key: str, tar: Path, taken: tuple[str, ...], left: tuple[str, ...]
    ) -> Path:
        return self._stages.stage(name, key_of_tree(key), lambda stage: unpack(tar, stage, taken, leave=left))

    def _make_parts(self, base: Path, tools: Path, tools_tar: Path, work: Path) -> dict[str, Part]:
        self._progress("kernel and initrd")
        kernel = _only(tools / "boot", "vmlinuz-*")
        shutil.copyfile(kernel, work / "kernel")
        modules = tools / "usr/lib/modules" / kernel.name.removeprefix("vmlinuz-")
        busybox = (tools / "usr/bin/busybox").read_bytes()
        initrd = build_initrd(modules, busybox, (HERE / "initrd.sh").read_bytes(), self._recipe.epoch)
        (work / "initrd").write_bytes(initrd)
        listed = run(["tar", "--extract", "--to-stdout", f"--file={base}", f"./{HOME}/packages.txt"])
        listed += run(["tar", "--extract", "--to-stdout", f"--file={tools_tar}", "./packages.txt"])
        (work / "packages").write_text(listed, encoding="utf-8")
        self._make_rootfs(base, tools, work)
        return {name: self._publish(name, work / name) for name in ("kernel", "initrd", "packages", "rootfs")}

    def _make_rootfs(self, base: Path, tools: Path, work: Path) -> None:
        self._progress("guest: compiling the supervisor and its launcher")
        key = key_of_base(self._recipe)
        compilers = self._unpacked("compilers", key, base, _COMPILERS_TAKEN, _COMPILERS_LEFT)
        epoch = self._recipe.epoch
        build_layer(compilers, self._sources, (HERE / "pid1.py").read_bytes(), epoch, work / "layer.tar")
        self._progress(f"rootfs: {self._recipe.disk_gib} GiB ext4")
        merge([base, work / "layer.tar"], work / "rootfs.tar")
        identity = digest_of([self._digests.digest(base), digest_file(work / "layer.tar")])
        make_ext4(tools, work / "rootfs.tar", self._recipe.disk_gib, epoch, identity, work / "rootfs")

    def _publish(self, name: str, built: Path) -> Part:
        part = publish_part(self._output, name, built, digest_file(built))
        self._digests.remember(self._output / part.file, part.sha256)
        return part


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ImageError(f"expected one {pattern} among the packages, not {len(found)}")
    return found[0]
