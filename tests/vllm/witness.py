"""A KVLoomConnector that bears witness: checksums of each transfer's KV, by the rank that sent it and the rank where it landed.

For tests with real servers, whose memory the test can't see. Decode sums what landed before vLLM is told that it is there; prefill sums what it has
before its blocks are given back. So both look at exactly the bytes of the transfer, at the moments that the connector answers for.
Written while the folder KVLOOM_TEST_WITNESS exists, one file a transfer, side and rank: FOLDER/KEY.SIDE.RANK.json,
{"begin": first token, "end": behind the last, "sums": {"group layer begin end": sum}}. A sum is of at most PIECE tokens, whose borders are
multiples of PIECE; kvloom.checksum says what it is of: added over ranks it is the same on both sides, whatever their sharding, blocks and layouts.
A load that failed is written as the side "failed"; there nothing is compared. Prefill does not know what decode has already: it sums all of the prompt but its last token, decode what it asked for.

    Settings(..., connector=kvloom_connector(...) | WITNESS, environment=((FOLDER, folder),))
    compare(folder)                       # [Seen]: what landed, and where it is not what was sent
"""

import dataclasses
import json
import os
import pathlib

WITNESS = {"kv_connector": "Witness", "kv_connector_module_path": "witness"}
FOLDER = "KVLOOM_TEST_WITNESS"
PIECE = 64  # tokens
MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of one transfer. Tokens [begin, end) were asked for; `wrong`: who failed, else the pieces whose bytes differ, or that prefill has no word of."""

    key: str
    begin: int
    end: int
    pieces: int
    wrong: tuple[str, ...]


def compare(folder: pathlib.Path) -> list[Seen]:
    """Each transfer that decode began. @pre both sides are quiet."""
    ended = [*folder.glob("*.decode.*.json"), *folder.glob("*.failed.*.json")]
    return [_compare_one(folder, key) for key in sorted({path.name.partition(".")[0] for path in ended})]


def _compare_one(folder: pathlib.Path, key: str) -> Seen:
    ranges, landed = _added(folder, key, "decode")
    ranges |= _added(folder, key, "failed")[0]
    _, sent = _added(folder, key, "prefill")
    failed = tuple(f"the load of rank {path.name.split('.')[2]} failed" for path in sorted(folder.glob(f"{key}.failed.*.json")))
    wrong = failed or tuple(piece for piece, total in landed.items() if sent.get(piece) != total)
    (begin, end), *others = sorted(ranges)
    return Seen(key, begin, end, len(landed), wrong + (("ranks asked for other tokens",) if others else ()))


def _added(folder: pathlib.Path, key: str, side: str) -> tuple[set[tuple[int, int]], dict[str, int]]:
    """(ranges of tokens that its ranks named, sums added over ranks)."""
    ranges, added = set(), {}
    for path in folder.glob(f"{key}.{side}.*.json"):
        said = json.loads(path.read_text())
        ranges.add((said["begin"], said["end"]))
        for piece, total in said["sums"].items():
            added[piece] = (added.get(piece, 0) + total) & MASK
    return ranges, added


# ---- in vLLM's workers ----

if FOLDER in os.environ:
    import kvloom
    import torch
    from kvloom.vllm import KVLoomConnector

    class Witness(KVLoomConnector):
        def __init__(self, *arguments, **named) -> None:
            super().__init__(*arguments, **named)
            self._keys: dict[str, str] = {}  # request -> transfer key
            self._chunks: dict[str, object] = {}  # request -> its last Chunk
            self._loads: dict[str, object] = {}  # request -> its Load
            self._folder = pathlib.Path(os.environ[FOLDER])

        def bind_connector_metadata(self, connector_metadata) -> None:
            self._keys |= {each.request: each.key for each in [*connector_metadata.offers, *connector_metadata.loads]}
            self._chunks |= {chunk.request: chunk for chunk in connector_metadata.chunks}
            self._loads |= {load.request: load for load in connector_metadata.loads}
            super().bind_connector_metadata(connector_metadata)

        def get_transfer_results(self, finished_req_ids):
            results = super().get_transfer_results(finished_req_ids)
            for name in results.finished_sending:
                if (chunk := self._chunks.pop(name, None)) and chunk.last:
                    self._write("prefill", self._keys.pop(name), chunk.tables, 0, chunk.tokens - 1)
            for name in results.finished_recving:
                load = self._loads.pop(name)
                side = "failed" if name in results.failed_recving else "decode"
                self._write(side, self._keys.pop(name), load.tables, load.begin, load.end)
            return results

        def _write(self, side: str, key: str, tables, begin: int, end: int) -> None:
            if not self._folder.is_dir():
                return
            rank = self._worker._rank
            said = {"begin": begin, "end": end, "sums": {} if side == "failed" else self._sums(tables, begin, end)}
            path = self._folder / f"{key}.{side}.{rank}.json"
            scratch = path.with_suffix(".scratch")
            scratch.write_text(json.dumps(said))
            scratch.rename(path)

        def _sums(self, tables, begin: int, end: int) -> dict[str, int]:
            placed, sums = self._worker._placed, {}
            for group in placed.groups:
                pages = [max(0, page) for page in placed.table(group, tables, end).pages]  # columns before a window: not read
                first = begin if group.shape.window is None else max(begin, end - group.shape.window.tokens)
                for cache in group.caches:
                    memory = _bytes_of(self._worker.tensors[cache.name])
                    for piece in _pieces(first, end):
                        total, _ = kvloom.checksum(placed.side, group.name, placed.rank, cache.layer, memory, pages, piece, end)
                        sums[f"{group.name} {cache.layer} {piece[0]} {piece[1]}"] = total
            return sums

    def _bytes_of(tensor: torch.Tensor):
        """All of its storage from its beginning on, uint8."""
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return raw[tensor.storage_offset() * tensor.element_size() :].numpy()

    def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
        borders = [begin, *range(begin // PIECE * PIECE + PIECE, end, PIECE), end]
        return [piece for piece in zip(borders, borders[1:]) if piece[0] < piece[1]]
