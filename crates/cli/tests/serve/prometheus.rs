//! Metrics in Prometheus: its linter, scraper and rules, and the dashboard.
//!
//! `scripts/prometheus` unpacks Debian's Prometheus; PARAVANE_PROMETHEUS names its folder. Without
//! it, programs on PATH are taken.
use crate::daemon::{Daemon, Folder, paravane, patience, skip, without_sandbox};
use crate::raw::Ask;
use crate::watching::Client;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A program of Prometheus; `None`: `test` is skipped.
fn program(name: &str, test: &str) -> Option<Command> {
    let path = match std::env::var_os("PARAVANE_PROMETHEUS") {
        Some(folder) => Path::new(&folder).join(name),
        None => PathBuf::from(name),
    };
    let works = Command::new(&path).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if works.is_ok_and(|status| status.success()) {
        return Some(Command::new(path));
    }
    skip(test, format!("no {name}: PARAVANE_PROMETHEUS=$(scripts/prometheus)"));
    None
}

/// Body of a response with status 200.
fn get(address: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: test\r\n{headers}\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.split(' ').nth(1) == Some("200"), "{path}: {text}");
    body.to_owned()
}

/// A daemon with a disk that a client has used, a card and an entropy source.
struct Served {
    _daemon: Daemon,
    _client: Client,
    address: String,
}

impl Served {
    const READS: usize = 5;

    fn start(folder: &Folder) -> Self {
        let disk =
            format!("[[blk]]\nname = \"vm0\"\nimage = \"{}\"\nsocket = \"s\"\n", folder.image("vm.img"));
        let others = "[[net]]\nname = \"card-1\"\necho = true\nsocket = \"n\"\n[[rng]]\nname = \"r\"\nsocket = \"r\"\n";
        let file = folder.write("d.toml", &(disk + others));
        let arguments = ["serve", "--config", &file, "--control", "off", "--metrics", "127.0.0.1:0"];
        let mut daemon =
            Daemon::spawn(paravane().args(arguments).args(["--log-format", "json"]).args(without_sandbox()));
        let line: Value = serde_json::from_str(&daemon.wait_for("/metrics")).unwrap();
        daemon.wait_for("ready");
        let mut client = Client::connect(&folder.path("s"));
        for sector in 0..Self::READS {
            assert_eq!(client.ask(Ask::Read, sector), 0);
        }
        Self { _daemon: daemon, _client: client, address: line["address"].as_str().unwrap().to_owned() }
    }
}

/// Names of metrics in the reference, without suffixes of histograms.
fn documented() -> BTreeSet<String> {
    let page = std::fs::read_to_string(repository().join("docs/reference/metrics.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split('`').next()).map(str::to_owned).collect()
}

/// Names of our metrics in a query.
fn named(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("paravane_") || word.starts_with("process_"));
    let histograms = ["paravane_device_latency_seconds", "paravane_device_stage_seconds"];
    let family = |name: &str| {
        let of = histograms.iter().find(|of| name.starts_with(*of));
        of.map_or(name, |of| of).to_owned()
    };
    names.map(family).collect()
}

fn dashboard() -> Value {
    let text = std::fs::read_to_string(repository().join("packaging/grafana/paravane.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// All queries of the dashboard, with Grafana's variables replaced.
fn queries(dashboard: &Value) -> Vec<String> {
    let targets = |panel: &Value| panel["targets"].as_array().cloned().unwrap_or_default();
    let panels = dashboard["panels"].as_array().unwrap().iter().flat_map(targets);
    let expression = |target: Value| target["expr"].as_str().expect("a query").to_owned();
    let replaced = |query: String| {
        let query = query.replace("$__rate_interval", "1m").replace("$__range", "1h");
        query.replace("$instance", ".*").replace("$device", ".*")
    };
    panels.map(expression).map(replaced).collect()
}

#[test]
fn the_dashboard_is_whole_and_names_documented_metrics() {
    let dashboard = dashboard();
    assert!(dashboard["schemaVersion"].as_u64().is_some_and(|version| version >= 36));
    assert_eq!((&dashboard["title"], &dashboard["uid"]), (&"Paravane".into(), &"paravane".into()));
    let variables: Vec<_> = dashboard["templating"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(variables, ["datasource", "instance", "device"]);
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().unwrap() {
        let kind = panel["type"].as_str().unwrap();
        assert!(["row", "stat", "timeseries", "heatmap"].contains(&kind), "{kind}");
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another panel's");
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        assert!(w > 0 && h > 0 && x + w <= 24, "{title} is not on the grid");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{title} overlaps another panel");
        }
        if kind == "row" {
            continue;
        }
        assert!(!panel["description"].as_str().unwrap().is_empty(), "{title}");
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        let mut refs = BTreeSet::new();
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}");
        for target in targets {
            assert!(refs.insert(target["refId"].as_str().unwrap().to_owned()), "{title}");
            assert!(target["legendFormat"].is_string(), "{title}");
        }
    }
    let documented = documented();
    for query in queries(&dashboard) {
        let names = named(&query);
        assert!(!names.is_empty() && names.is_subset(&documented), "{query}: {names:?}");
    }
}

#[test]
fn the_dashboard_has_grafanas_schema() {
    let faults = ["/schemaVersion", "/panels/0/gridPos", "/panels/1/gridPos/w", "/panels/1/targets/0/expr"];
    crate::schema::assert_valid(
        "the_dashboard_has_grafanas_schema",
        "crates/cli/tests/schemas/grafana-dashboard.schema.json",
        &dashboard(),
        &faults,
    );
}

#[test]
fn both_formats_are_served() {
    let folder = Folder::new();
    let served = Served::start(&folder);
    let open = get(&served.address, "/metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n");
    assert!(open.ends_with("# EOF\n") && open.contains("# TYPE paravane_device_kicks counter\n"), "{open}");
    let plain = get(&served.address, "/metrics", "");
    assert!(
        !plain.contains("# EOF") && plain.contains("# TYPE paravane_device_kicks_total counter\n"),
        "{plain}"
    );
    let samples = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
    };
    assert_eq!(samples(&open), samples(&plain));
    // Every sample is documented.
    let (known, suffixes) = (documented(), ["_bucket", "_sum", "_count"]);
    for sample in samples(&plain) {
        let name = sample.split('{').next().unwrap();
        let histogram = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
        assert!(known.contains(name) || histogram.is_some_and(|name| known.contains(name)), "{sample}");
    }
    // The figures that are read through files are there, in the sandbox too.
    for name in [
        "process_cpu_seconds_total ",
        "process_resident_memory_bytes ",
        "process_start_time_seconds ",
        "process_max_fds ",
        "paravane_io_thread_cpu_seconds_total{thread=\"io0\"} ",
        "paravane_io_thread_run_delay_seconds_total{thread=\"io0\"} ",
        "paravane_device_busy_seconds_total{device=\"vm0\",kind=\"blk\"} ",
    ] {
        assert!(plain.contains(&format!("\n{name}")), "{name} is not in\n{plain}");
    }
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default()
}

#[test]
fn promtool_accepts_the_metrics_and_the_rules() {
    const TEST: &str = "promtool_accepts_the_metrics_and_the_rules";
    let Some(mut promtool) = program("promtool", TEST) else { return };
    let folder = Folder::new();
    let served = Served::start(&folder);
    let text = get(&served.address, "/metrics", "");
    let check = promtool
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut check = check.spawn().unwrap();
    check.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success() && said.is_empty(), "{}\n{text}", String::from_utf8_lossy(&said));
    let rules = repository().join("packaging/prometheus");
    for (command, file) in [("check", "paravane-alerts.yml"), ("test", "paravane-alerts-test.yml")] {
        let Some(mut promtool) = program("promtool", TEST) else { return };
        let output = promtool.args([command, "rules"]).arg(rules.join(file)).output().unwrap();
        assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let alerts = std::fs::read_to_string(rules.join("paravane-alerts.yml")).unwrap();
    // A test of an alert that does not exist expects none, and passes.
    let tests = std::fs::read_to_string(rules.join("paravane-alerts-test.yml")).unwrap();
    let tested: BTreeSet<_> = tests.split("alertname: ").skip(1).map(first_word).collect();
    let exist: BTreeSet<_> = alerts.split("- alert: ").skip(1).map(first_word).collect();
    assert_eq!(tested, exist);
    let names = named(&alerts);
    assert!(names.is_subset(&documented()), "{names:?}");
}

/// A running Prometheus, killed when dropped.
struct Prometheus {
    child: Child,
    address: String,
    log: PathBuf,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(mut command: Command, folder: &Folder, target: &str) -> Self {
        let rules = repository().join("packaging/prometheus/paravane-alerts.yml").canonicalize().unwrap();
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules:?}]\nscrape_configs:\n  \
             - job_name: paravane\n    static_configs: [{{targets: [\"{target}\"]}}]\n"
        );
        let config = folder.write("prometheus.yml", &config);
        // Prometheus does not tell which port it chose: take a free one.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let log = folder.path("prometheus.log");
        let child = command
            .arg(format!("--config.file={config}"))
            .arg(format!("--storage.tsdb.path={}", folder.text("data")))
            .arg(format!("--web.listen-address={address}"))
            .current_dir(folder.root())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self { child, address, log }
    }

    /// The log, for messages.
    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The answer to a request of its interface.
    fn ask(&self, path: &str) -> Value {
        let answer: Value = serde_json::from_str(&get(&self.address, path, "")).unwrap();
        assert_eq!(answer["status"], "success", "{path}: {answer}");
        answer["data"].clone()
    }

    /// The vector that a query has as its result.
    fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let data = self.ask(&format!("/api/v1/query?query={encoded}"));
        data["result"].as_array().unwrap().clone()
    }

    /// Waits until a query has a result, and returns its value.
    fn wait_for(&mut self, query: &str) -> String {
        let end = Instant::now() + patience();
        loop {
            let exited = self.child.try_wait().unwrap();
            assert!(exited.is_none() && Instant::now() < end, "no {query}:\n{}", self.log());
            if TcpStream::connect(&self.address).is_ok()
                && get_ready(&self.address)
                && let [first, ..] = &self.query(query)[..]
            {
                return first["value"][1].as_str().unwrap().to_owned();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Whether Prometheus has started.
fn get_ready(address: &str) -> bool {
    let Ok(mut stream) = TcpStream::connect(address) else { return false };
    let _ = stream.set_read_timeout(Some(patience()));
    let mut text = String::new();
    let asked =
        stream.write_all(b"GET /-/ready HTTP/1.0\r\n\r\n").and_then(|()| stream.read_to_string(&mut text));
    asked.is_ok() && text.split(' ').nth(1) == Some("200")
}

#[test]
fn prometheus_scrapes_a_daemon_and_parses_the_dashboard() {
    const TEST: &str = "prometheus_scrapes_a_daemon_and_parses_the_dashboard";
    let Some(command) = program("prometheus", TEST) else { return };
    let folder = Folder::new();
    let served = Served::start(&folder);
    let mut prometheus = Prometheus::start(command, &folder, &served.address);
    assert_eq!(prometheus.wait_for("up{job=\"paravane\"} == 1"), "1");
    let reads = Served::READS.to_string();
    assert_eq!(prometheus.wait_for("paravane_device_buffers_completed_total{device=\"vm0\"}"), reads);
    assert_eq!(prometheus.wait_for("paravane_device_connected{device=\"card-1\"}"), "0");
    for query in [
        "paravane_build_info{version!=\"\"}",
        "process_start_time_seconds{job=\"paravane\"}",
        "paravane_io_thread_run_delay_seconds_total{thread=\"io0\"}",
    ] {
        prometheus.wait_for(query);
    }
    // The types are those of OpenMetrics, which Prometheus asks for.
    let metadata = prometheus.ask("/api/v1/metadata");
    let kind = |name: &str| metadata[name][0]["type"].as_str().unwrap_or("missing").to_owned();
    for (name, expected) in [
        ("paravane_device_kicks", "counter"),
        ("paravane_device_connected", "gauge"),
        ("paravane_build", "info"),
    ] {
        assert_eq!(kind(name), expected, "{name}: {metadata}");
    }
    for query in queries(&dashboard()) {
        let _ = prometheus.query(&query);
    }
    let groups = prometheus.ask("/api/v1/rules?type=alert");
    let alerts = repository().join("packaging/prometheus/paravane-alerts.yml");
    let alerts = std::fs::read_to_string(alerts).unwrap().matches("- alert: ").count();
    assert_eq!(groups["groups"][0]["rules"].as_array().map(Vec::len), Some(alerts), "{groups}");
    assert!(!prometheus.log().contains("level=error"), "{}", prometheus.log());
}
