//! Try.
fn main() {
    if let Some(_c) = paravane_bench::child_main() {
        std::process::exit(0);
    }
    for case in std::env::args().skip(2) {
        let s = std::env::args().nth(1).unwrap();
        for s in ["script", &s] {
            let t = std::time::Instant::now();
            println!("{case} {s} {:?} {:?}", paravane_bench::single_step(&case, s), t.elapsed());
        }
    }
}
