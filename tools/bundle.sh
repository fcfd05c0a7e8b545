#!/bin/sh
# Packs the program into an archive that runs on another x86-64 Linux: unpack it, run bin/spillway.
#
#   tools/bundle.sh BUILD_DIR OUT.tar.xz [PROGRAM…]      PROGRAM: more of the build directory's programs, into bin, too
#
# lib/ holds libspillway.so, the plugins for GPUs and every shared library that is neither the C library's nor CUDA's.
# Those two are the machine's own: a C library as new as this machine's, for GPUs a driver, and cuBLASLt where the
# dynamic linker finds it or in /usr/local/cuda. python/ is the package for PyTorch loops: SPILLWAY_LIBRARY names
# lib/libspillway.so.0 to it. The file commit says what it was made of. Prints the size of the archive.
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
build=$1 out=$2
shift 2
"$(dirname "$0")/install_packages.sh" patchelf xz-utils
[ -x "$build/tools/spillway" ] || { echo "bundle.sh: $build/tools/spillway is not there; build it first" >&2; exit 1; }

staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
root=$staging/spillway
mkdir -p "$root/bin" "$root/lib"
cp "$build/tools/spillway" "$root/bin/"
for program in "$@"; do cp "$build/$program" "$root/bin/"; done
for library in src/libspillway.so.0 kernels/libspillway_cuda.so tools/models/libspillway_models_cuda.so; do
  if [ -f "$build/$library" ]; then cp -L "$build/$library" "$root/lib/"; fi
done
mkdir "$root/python"
cp -r "$(dirname "$0")/../python/spillway" "$root/python/"
find "$root/python" -name __pycache__ -prune -exec rm -rf {} +

# What the dynamic linker would load here. Libraries of libraries are in its list, too.
ldd "$root"/bin/* "$root"/lib/* | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u | while read -r library; do
  case $(basename "$library") in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libresolv.so.*) ;;
    libcu* | libnv* | libnccl*) ;;
    *) cp -L "$library" "$root/lib/" ;;
  esac
done

strip --strip-unneeded "$root"/bin/* "$root"/lib/*
cuda=/usr/local/cuda/lib64:/usr/local/cuda/targets/x86_64-linux/lib
for file in "$root"/lib/*; do patchelf --set-rpath "\$ORIGIN:$cuda" "$file"; done
for file in "$root"/bin/*; do patchelf --set-rpath "\$ORIGIN/../lib:$cuda" "$file"; done
cp "$(dirname "$0")/../LICENSE" "$root/"
git -C "$(dirname "$0")/.." describe --always --dirty --abbrev=12 >"$root/commit" 2>/dev/null || rm -f "$root/commit"
tar -C "$staging" -c spillway | xz -T0 -6 >"$out.part"
mv "$out.part" "$out"
echo "$out: $(($(stat -c %s "$out") / 1048576)) MiB, unpacked $(($(du -sb "$root" | cut -f1) / 1048576)) MiB"
