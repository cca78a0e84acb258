//! The report of `paravane status --json` against its schema.
use crate::daemon::{Daemon, Folder, paravane};
use crate::raw::Ask;
use crate::watching::Client;
use serde_json::Value;

#[test]
fn the_report_has_its_schema() {
    let folder = Folder::new();
    let disk = format!("[[blk]]\nname = \"vm0\"\nimage = \"{}\"\nsocket = \"s\"\n", folder.image("vm.img"));
    let others =
        "[[net]]\nname = \"card\"\necho = true\nsocket = \"n\"\n[[rng]]\nname = \"r\"\nsocket = \"r\"\n";
    let file = folder.write("d.toml", &(disk + others));
    let control = folder.text("control");
    let _daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let mut client = Client::connect(&folder.path("s"));
    assert_eq!(client.ask(Ask::Read, 0), 0);
    for seconds in ["0", "0.1"] {
        let arguments = ["status", "--json", "--seconds", seconds, "--control", &control];
        let output = paravane().args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report[0]["devices"][0]["queues"][0]["operations"][0]["operation"], "read", "{report:#}");
        crate::schema::assert_valid(
            "the_report_has_its_schema",
            "docs/reference/status.schema.json",
            &report,
            &[
                "/0/pid",
                "/0/devices/0/kind",
                "/0/devices/0/queues/0/kicks",
                "/0/devices/1/net/received_bytes",
            ],
        );
    }
}
