//! JSON against its schema, by Debian's `jsonschema` (package python3-jsonschema).
use paravane_test_support::skip;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

fn read(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Forbids fields that the schema does not list: what we write is listed.
fn forbid_others(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.contains_key("properties") && fields.contains_key("type") {
                fields.entry("additionalProperties").or_insert(false.into());
            }
            fields.values_mut().for_each(forbid_others);
        }
        Value::Array(items) => items.iter_mut().for_each(forbid_others),
        _ => {}
    }
}

/// What `jsonschema` says of a value that is invalid.
fn validate(schema: &Value, value: &Value) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, value: &Value| {
        let path = folder.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path
    };
    let mut command = Command::new("jsonschema");
    command.arg("-i").arg(file("value.json", value)).arg(file("schema.json", schema));
    let output = command.stdin(Stdio::null()).output().unwrap();
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Asserts that a value has the schema in the file `schema`. Then that each of `faults` is found:
/// JSON pointers of fields that are removed, one at a time.
pub(crate) fn assert_valid(test: &str, schema: &str, value: &Value, faults: &[&str]) {
    let mut version = Command::new("jsonschema");
    version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    if !version.status().is_ok_and(|status| status.success()) {
        return skip(test, "no jsonschema: apt-get install python3-jsonschema");
    }
    let mut strict = read(schema);
    forbid_others(&mut strict);
    if let Err(why) = validate(&strict, value) {
        panic!("{schema}: {why}\n{value:#}");
    }
    for fault in faults {
        let (parent, name) = fault.rsplit_once('/').unwrap();
        let mut wrong = value.clone();
        let fields = wrong.pointer_mut(parent).and_then(Value::as_object_mut);
        assert!(fields.expect("an object").remove(name).is_some(), "there is no {fault}");
        assert!(validate(&strict, &wrong).is_err(), "{schema}: {fault} may be missing");
    }
    if let Some(mut wrong) = value.as_object().cloned() {
        wrong.insert("unknown".into(), 1.into());
        assert!(validate(&strict, &wrong.into()).is_err(), "{schema}: unknown fields are valid");
    }
}
