#!/usr/bin/env bash
# format.sh [--check] [--changed]: formats our C++ with clang-format, or only says which files it would change.
# --changed takes only files that git knows as new or changed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

check=no changed=no
for word in "$@"; do
  case "$word" in
    --check) check=yes ;;
    --changed) changed=yes ;;
    *) echo "usage: format.sh [--check] [--changed]" >&2; exit 2 ;;
  esac
done

folders=()
for folder in src tests bench python; do [[ -d "$folder" ]] && folders+=("$folder"); done
if [[ "$changed" == yes ]] && git rev-parse --git-dir >/dev/null 2>&1; then
  list() { { git diff --name-only -z --diff-filter=d HEAD -- "${folders[@]}" 2>/dev/null || true; git ls-files -zo --exclude-standard -- "${folders[@]}"; } | sort -zu; }
else
  list() { find "${folders[@]}" -type f -print0 | sort -z; }
fi
mapfile -d '' files < <(list | grep -zE '\.(h|cc|cu|cuh)$' || true)
[[ ${#files[@]} -gt 0 ]] || { echo "No files to format."; exit 0; }

if [[ "$check" == no ]]; then
  clang-format -i "${files[@]}"
  exit 0
fi
bad=()
for file in "${files[@]}"; do
  clang-format "$file" | cmp -s - "$file" || bad+=("$file")
done
if [[ ${#bad[@]} -gt 0 ]]; then
  printf '%s\n' "${bad[@]}"
  echo "${#bad[@]} of ${#files[@]} files are not formatted: make format"
  exit 1
fi
echo "${#files[@]} files are formatted."
