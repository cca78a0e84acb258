//! Try.
fn main() {
    if let Some(_c) = paravane_bench::child_main() { std::process::exit(0); }
    let t = std::time::Instant::now();
    let rows = paravane_bench::run("ring", &paravane_bench::Options { rounds: 5, filter: std::env::args().nth(1) }, &mut |p| if std::env::var_os("V").is_some() { eprintln!("{p}") }).unwrap();
    print!("{}", paravane_bench::table(&rows));
    eprintln!("{:?}", t.elapsed());
}
