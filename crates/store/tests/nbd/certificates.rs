//! Authorities, certificates and keys of a test.
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes authorities, certificates and keys as `certtool` does.
pub(crate) fn certificates(folder: &Path) {
    let run = |arguments: &[&str], template: &str| {
        fs::write(folder.join("template"), template).unwrap();
        let mut command = Command::new("certtool");
        command.current_dir(folder).args(arguments).stderr(Stdio::null()).stdout(Stdio::null());
        assert!(command.status().unwrap().success(), "certtool {arguments:?}");
    };
    let key =
        |name: &str| run(&["--generate-privkey", "--key-type=rsa", "--bits=2048", "--outfile", name], "");
    let authority = |key_file: &str, file: &str, name: &str| {
        key(key_file);
        let list = [
            "--generate-self-signed",
            "--load-privkey",
            key_file,
            "--template",
            "template",
            "--outfile",
            file,
        ];
        run(&list, &format!("cn = {name}\nca\ncert_signing_key\n"));
    };
    authority("ca-key.pem", "ca-cert.pem", "authority");
    authority("other-ca-key.pem", "other-ca-cert.pem", "other");
    let issue = |key_file: &str, file: &str, ca: &str, template: &str| {
        key(key_file);
        let (ca_key, ca_cert) = (format!("{ca}ca-key.pem"), format!("{ca}ca-cert.pem"));
        let list = [
            "--generate-certificate",
            "--load-ca-certificate",
            &ca_cert,
            "--load-ca-privkey",
            &ca_key,
            "--load-privkey",
            key_file,
            "--template",
            "template",
            "--outfile",
            file,
        ];
        run(&list, template);
    };
    let server = "cn = localhost\ndns_name = localhost\ntls_www_server\nsigning_key\n";
    issue("server-key.pem", "server-cert.pem", "", server);
    issue("client-key.pem", "client-cert.pem", "", "cn = client\ntls_www_client\nsigning_key\n");
    let expired = "activation_date = \"2020-01-01 00:00:00\"\nexpiration_date = \"2020-01-02 00:00:00\"\n";
    issue("expired-key.pem", "expired-cert.pem", "", &format!("{server}{expired}"));
}
