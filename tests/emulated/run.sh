#!/bin/bash
# Runs kernels.cpp for CPUs that are not at hand and compares what it prints with what this machine's build prints:
# x86-64 with AVX-512 on Linux in Bochs, arm64 in qemu's user mode. See README.md beside this file.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${WORK:-$(mktemp -d)}
kernel=${KERNEL:-$(ls /boot/vmlinuz-* | tail -n 1)}
flags="-std=c++17 -O3 -pthread -ffp-contract=off -Wno-psabi -static"

x86=("-march=skylake-avx512" "-march=icelake-client" "-march=icelake-client -DBATON_WIDTH=8")
root=$work/root image=$work/image
mkdir -p "$root"/{dev,bin,builds} "$image/isolinux"

echo "compiling in $work"
g++ $flags -march="${HERE:-native}" "$here/kernels.cpp" -o "$work/here"
"$work/here" > "$work/here.txt"
for i in "${!x86[@]}"; do g++ $flags ${x86[$i]} "$here/kernels.cpp" -o "$root/builds/$i"; done

compare() { # what, its lines
    if cmp -s "$work/here.txt" "$2"; then
        echo "same bits, $(wc -l < "$2") lines: $1"
    else
        echo "DIFFERENT, see diff $work/here.txt $2: $1"
        differ=1
    fi
}
differ=0

if command -v aarch64-linux-gnu-g++ > /dev/null; then
    aarch64-linux-gnu-g++ $flags -march=armv8.2-a "$here/kernels.cpp" -o "$work/arm64"
    qemu-aarch64-static "$work/arm64" > "$work/arm64.txt"
    compare "arm64" "$work/arm64.txt"
fi

# A machine whose only program runs every build. `sleep` lets the serial line empty before the power goes.
cp "$(command -v busybox)" "$root/bin/busybox"
cat > "$root/init" << 'END'
#!/bin/busybox sh
for build in /builds/*; do
    echo "build ${build#/builds/}"
    $build || echo "exit status $?"
done
echo finished
/bin/busybox sleep 2
/bin/busybox poweroff -f
END
chmod 755 "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet -R 0:0 > "$image/initrd")
cp "$kernel" "$image/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$image/isolinux"
# Bochs 2.7 tells the sizes of compacted and of protection-key state wrongly (xsavec, xsaves, pku), and Linux would do
# without AVX altogether; and it hardly moves where short copies are said to be fast (erms, fsrm).
cat > "$image/isolinux/isolinux.cfg" << 'END'
default linux
label linux
 kernel /vmlinuz
 append initrd=/initrd console=ttyS0 loglevel=4 panic=-1 mitigations=off nosmp clearcpuid=297,321,323,515,580
END
xorriso -as mkisofs -quiet -o "$work/disc.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot \
    -boot-load-size 4 -boot-info-table "$image" 2> /dev/null

cat > "$work/bochsrc" << END
cpu: model=corei7_icelake_u, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=256, host=256
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path=$work/disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial
speaker: enabled=0
display_library: term
log: $work/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
clock: sync=none
END
echo c > "$work/commands" # Debian's Bochs starts in its debugger
echo "emulating (minutes); follow $work/serial"
bochs="bochs -q -f $work/bochsrc -rc $work/commands"
TERM=xterm script -qfc "$bochs" "$work/terminal" < /dev/null > /dev/null 2>&1 || true # it wants a terminal

tr -d '\r' < "$work/serial" > "$work/serial.txt"
for i in "${!x86[@]}"; do
    awk -v build="build $i" '/^build |^finished/ { on = $0 == build; next } on && !/^\[ *[0-9]/' \
        "$work/serial.txt" > "$work/$i.txt"
    compare "${x86[$i]}" "$work/$i.txt"
done
exit $differ
