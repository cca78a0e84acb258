//! The points in the program where tracers attach: the only inline assembly of this crate.
//!
//! A probe is a `nop`, a semaphore in the section `.probes`, and a note in the section
//! `.note.stapsdt` that tells tracers where they are and in which registers the arguments lie
//! (format: <https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation>). `strip` keeps the
//! notes. Each probe has one place in the program: its function `fire`, which is not inlined.
//!
//! Two published crates make such points. `probe` 0.5 cannot ask whether a tracer is attached
//! without firing, and the recorder must know when a request is done whether to keep it until its
//! end; `usdt` 0.6 needs two parsers and procedural macros.
use crate::latency::probe::Probe;

/// The nop of a probe, and its note.
macro_rules! point {
    ($($all:tt)*) => {
        // Tracers read registers of x86 in AT&T syntax.
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        note!([, att_syntax] $($all)*);
        #[cfg(all(target_os = "linux", any(target_arch = "aarch64", target_arch = "riscv64")))]
        note!([] $($all)*);
        #[cfg(not(all(
            target_os = "linux",
            any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")
        )))]
        no_note!($($all)*);
    };
}

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")
))]
macro_rules! note {
    ([$($syntax:tt)*] $text:literal, $semaphore:ident, $first:ident $(, $argument:ident)*) => {
        // SAFETY: the one instruction is a nop, and the rest goes to sections that the program does
        // not read. A tracer's breakpoint restores all registers. Not `nomem`: a tracer reads the
        // strings that arguments point to, so they must have been written.
        unsafe {
            std::arch::asm!(
                "771: nop",
                // In the section group of the function, if it has one, so that both stay or go.
                ".pushsection .note.stapsdt, \"?\", \"note\"",
                ".balign 4",
                ".4byte 773f - 772f, 775f - 774f, 3",
                "772: .asciz \"stapsdt\"",
                "773: .balign 4",
                "774: .8byte 771b, _.stapsdt.base, {semaphore}",
                ".asciz \"paravane\"",
                concat!(".asciz \"", $text, "\""),
                ".ascii \"8@{}\"",
                $(concat!(".ascii \" 8@{}\" /* ", stringify!($argument), " */"),)*
                ".byte 0",
                "775: .balign 4",
                ".popsection",
                // Its address, compared with the one in the notes, tells whether the program was
                // moved after linking (prelink). "R": the linker keeps it, though only notes name it.
                ".ifndef _.stapsdt.base",
                ".pushsection .stapsdt.base, \"aGR\", \"progbits\", .stapsdt.base, comdat",
                ".weak _.stapsdt.base",
                ".hidden _.stapsdt.base",
                "_.stapsdt.base: .space 1",
                ".size _.stapsdt.base, 1",
                ".popsection",
                ".endif",
                in(reg) $first,
                $(in(reg) $argument,)*
                semaphore = sym $semaphore,
                options(readonly, nostack, preserves_flags $($syntax)*),
            );
        }
    };
}

/// Elsewhere nobody can attach.
#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")
)))]
macro_rules! no_note {
    ($text:literal, $semaphore:ident $(, $argument:ident)*) => {
        let _ = ($($argument,)*);
    };
}

macro_rules! probes {
    ($($name:ident $text:literal, $when:literal: $first:ident $(, $argument:ident)*;)*) => {
        /// Probes of the program, in the order of a request.
        pub const PROBES: &[Probe] = &[$(Probe {
            name: $text,
            when: $when,
            arguments: &[stringify!($first) $(, stringify!($argument))*],
        }),*];

        $(
            #[doc = $when]
            pub(super) mod $name {
                use std::sync::atomic::{AtomicU16, Ordering};

                /// Number of tracers. The kernel writes it.
                // SAFETY: any data may lie in a section of this name, which the program does not read
                // as a whole. It is writable, as tracers need, since the type is atomic.
                #[unsafe(link_section = ".probes")]
                static SEMAPHORE: AtomicU16 = AtomicU16::new(0);

                /// Whether a tracer is attached.
                #[inline]
                pub(crate) fn is_enabled() -> bool {
                    // Relaxed: orders nothing. A probe that misses the change is not seen.
                    SEMAPHORE.load(Ordering::Relaxed) != 0
                }

                /// The probe. Call it only if [`is_enabled`].
                #[cold]
                #[inline(never)]
                pub(crate) fn fire($first: u64 $(, $argument: u64)*) {
                    point!($text, SEMAPHORE, $first $(, $argument)*);
                }
            }
        )*
    };
}

probes! {
    kick "kick", "A kick arrived. Kicks that arrive together count once.":
        device, queue;
    throttle_begin "throttle__begin", "A rate limit holds the queue from now on.":
        device, queue;
    throttle_end "throttle__end", "The rate limit lets the queue continue.":
        device, queue, time;
    batch_taken "batch__taken", "Chains were taken from the ring together.":
        device, queue, count, depth;
    request_taken "request__taken", "A request of a disk was taken from the ring.":
        device, queue, head, operation, sector, bytes;
    request_started "request__started", "The request goes to storage. It does not fire for requests without storage I/O.":
        device, queue, head, operation, sector, bytes;
    request_done "request__done", "Storage is done with the request, or it was answered without.":
        device, queue, head, operation, status, time;
    interrupt "interrupt", "The driver was interrupted.":
        device, queue;
    request_ended "request__ended", "The request is answered, and the driver was interrupted if it asked for that.":
        device, queue, head, operation, status, time;
    request_stage "request__stage", "As `request__ended`, once for each stage of the request.":
        device, queue, head, operation, stage, time;
    batch_ended "batch__ended", "Requests of any device that were taken together and done together have ended.":
        device, queue, operation, count, time;
    batch_stage "batch__stage", "As `batch__ended`, once for each stage.":
        device, queue, operation, count, stage, time;
}
