//! Validation of requests.
use crate::daemon::{Folder, assert_refused, paravane};
use std::process::Output;

fn check(arguments: &[&str]) -> Output {
    paravane().args(["serve", "--check"]).args(arguments).output().expect("the program starts")
}

#[test]
fn check_validates_without_effects() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("vm.img"), folder.text("s"));
    let output = check(&["blk", "--image", &image, "--socket", &socket, "--queues", "4"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"configuration valid: 1 device\n");
    assert!(!folder.path("s").exists());
    let file = folder.write(
        "devices.toml",
        "[[blk]]\nname = \"a\"\nimage = \"vm.img\"\nsocket = \"s\"\n\n[[rng]]\nname = \"r\"\nconnect = \"t\"\n",
    );
    let output = check(&["--config", &file]);
    assert_eq!(
        output.stdout,
        b"configuration valid: 2 devices\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn errors_name_the_problem() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("vm.img"), folder.text("s"));
    assert_refused(&check(&[]), "no device: name one");
    assert_refused(&check(&["blk", "--socket", &socket]), "--image");
    assert_refused(&check(&["blk", "--image", &image]), "--socket");
    assert_refused(&check(&["blk", "--image", &image, "--socket", &socket, "--queues", "0"]), "--queues: 0");
    assert_refused(&check(&["blk", "--image", "/nonexistent", "--socket", &socket]), "/nonexistent");
    assert_refused(&check(&["blk", "--image", &folder.text("."), "--socket", &socket]), "is a directory");
    assert_refused(
        &check(&["blk", "--image", &image, "--socket", "/nonexistent/s"]),
        "no directory /nonexistent",
    );
    assert_refused(&check(&["net", "--link", "l", "--socket", &socket]), "--link: \"l\" connects two");
    assert_refused(&check(&["net", "--echo", "--sink", "--socket", &socket]), "--sink");
    assert_refused(&check(&["rng", "--socket", &socket, "--user", "nobody-of-this-name"]), "nobody-of-this");
    assert_refused(&check(&["--config", "/nonexistent.toml"]), "/nonexistent.toml: No such file");
    let file = folder.write("devices.toml", "[[blk]]\nname = \"a\"\n\nimage = \"vm.img\"\nsocket = 5.5\n");
    assert_refused(&check(&["--config", &file]), "devices.toml:5: socket: ");
    assert_refused(&check(&["--config", &file, "rng", "--socket", &socket]), "exclude each other");
}

#[test]
fn an_argument_that_is_not_utf8_is_invalid() {
    use std::os::unix::ffi::OsStrExt;
    let no_text = std::ffi::OsStr::from_bytes(b"\xff");
    for arguments in [&[no_text][..], &["serve".as_ref(), "--log-rate".as_ref(), no_text]] {
        let output = paravane().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
